"use strict";
// Draws the page's tables from the JSON beside it. All text of the data reaches the document
// as text nodes; nothing is parsed as HTML, and no style attribute is written.
(() => {
  const { report, chance } = JSON.parse(document.getElementById("data").textContent);
  const systems = report.systems;
  const units = report.paper_set.dois ? "papers" : "items";
  const byId = (id) => document.getElementById(id);
  const DASH = "–";
  const NAMES = { mrr: "MRR", win_rate: "Win rate" };
  const capitalised = (word) => word.replace(/^./, (first) => first.toUpperCase());
  const metricName = (metric) =>
    NAMES[metric] ?? capitalised(metric).replaceAll("_", " ");

  // ---- Elements and numbers

  function element(tag, properties = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (value === undefined) continue;
      if (name in made) made[name] = value;
      else made.setAttribute(name, value);
    }
    made.append(...children.filter((child) => child !== undefined));
    return made;
  }

  function svg(tag, attributes, ...children) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  const minus = (text) => text.replace("-", "\u2212");

  function figureOf(metric, value) {
    if (metric === "mrr") return value.toFixed(3);
    return (100 * value).toFixed(1) + "\u202f%";
  }

  function intervalOf(metric, measured) {
    if (measured.low === undefined) return "";
    const [digits, factor] = metric === "mrr" ? [3, 1] : [1, 100];
    const bound = (value) => (factor * value).toFixed(digits);
    const [low, high] = [bound(measured.low), bound(measured.high)];
    return low === high ? "no spread" : `[${low}, ${high}]`;
  }

  function scoreText(score) {
    if (Number.isInteger(score)) return minus(String(score));
    const size = Math.abs(score);
    return minus(score.toFixed(size >= 1000 ? 0 : size >= 100 ? 1 : 3));
  }

  /** An interval on a track from 0 to 1, with chance as a dotted line. */
  function bar(measured, reference) {
    const at = (value) => `${100 * value}%`;
    const parts = [svg("line", { class: "track", x1: "0%", x2: "100%", y1: "50%", y2: "50%" })];
    if (reference !== undefined) {
      const x = at(reference);
      parts.push(svg("line", { class: "reference", x1: x, x2: x, y1: "0%", y2: "100%" }));
    }
    if (measured?.low !== undefined) {
      const ends = { x1: at(measured.low), x2: at(measured.high), y1: "50%", y2: "50%" };
      parts.push(svg("line", { class: "range", ...ends }));
    }
    if (measured?.value !== undefined) {
      parts.push(svg("circle", { class: "point", cx: at(measured.value), cy: "50%", r: 4 }));
    }
    return svg("svg", { class: "bar", "aria-hidden": "true" }, ...parts);
  }

  function histogram(shares) {
    const highest = Math.max(...shares);
    const columns = shares.map((share, index) => {
      const height = Math.max((20 * share) / highest, 0.5);
      return svg("rect", { x: 4 * index, y: 20 - height, width: 3, height });
    });
    const percents = shares.map((share) => (100 * share).toFixed(0)).join(", ");
    const label = `Percent of ${units} with the gold at rank 1 to ${shares.length}: ${percents}`;
    return svg(
      "svg",
      {
        class: "histogram",
        viewBox: `0 0 ${4 * shares.length} 20`,
        preserveAspectRatio: "none",
        role: "img",
        "aria-label": label,
      },
      svg("title", {}, label),
      ...columns,
    );
  }

  // ---- A table that sorts

  /**
   * Fills a table and sorts it by its head's buttons.
   *
   * A column has a `label`, `cell(row, td)`, which fills a cell, and, where it sorts,
   * `value(row)`: a number, a text, or undefined, which comes last in either direction.
   * `descending` says where a first click begins. The first column heads its rows. `below(row)`
   * is a text for a line of its own under the row, or undefined.
   */
  function sortableTable(table, { rowClass, below, empty, onSort }) {
    const head = table.createTHead();
    const body = table.createTBody();
    let columns = [];
    let rows = [];
    let sorted = { key: undefined, descending: true };

    function compare(first, second) {
      const { value } = columns.find((column) => column.key === sorted.key);
      const [a, b] = [value(first), value(second)];
      if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
      const order = typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b;
      return sorted.descending ? -order : order;
    }

    function drawBody() {
      const shown = sorted.key === undefined ? rows : [...rows].sort(compare);
      const lines = shown.flatMap((row) => {
        const line = element("tr", { className: rowClass(row) });
        columns.forEach((column, index) => {
          const cell = index ? element("td") : element("th", { scope: "row" });
          if (column.numeric) cell.className = "number";
          column.cell(row, cell);
          if (!cell.hasChildNodes()) cell.append(DASH);
          line.append(cell);
        });
        const text = below?.(row);
        if (text === undefined) return [line];
        const cell = element("td", { colSpan: columns.length }, element("div", {}, text));
        return [line, element("tr", { className: `${rowClass(row)} below` }, cell)];
      });
      if (!lines.length) {
        const cell = element("td", { className: "empty", colSpan: columns.length }, empty);
        lines.push(element("tr", {}, cell));
      }
      body.replaceChildren(...lines);
    }

    function markHead() {
      [...head.rows[0].cells].forEach((cell, index) => {
        if (columns[index].key !== sorted.key || sorted.key === undefined) {
          cell.removeAttribute("aria-sort");
        } else {
          cell.setAttribute("aria-sort", sorted.descending ? "descending" : "ascending");
        }
      });
    }

    function sortBy(column) {
      const again = sorted.key === column.key;
      const descending = again ? !sorted.descending : Boolean(column.descending);
      sorted = { key: column.key, descending };
      markHead();
      drawBody();
      onSort?.(column.spoken ?? column.label, descending);
    }

    function headCell(column) {
      const names = [column.headClass, column.numeric ? "number" : "", column.value ? "sorts" : ""];
      const cell = element("th", { scope: "col", className: names.filter(Boolean).join(" ") });
      const label = column.head?.() ?? column.label;
      if (!column.value) cell.append(label);
      else cell.append(element("button", { type: "button", onclick: () => sortBy(column) }, label));
      return cell;
    }

    return {
      /** Replaces columns and rows; the order stays where its column does. */
      draw(newColumns, newRows, start) {
        columns = newColumns;
        rows = newRows;
        if (!columns.some((column) => column.key === sorted.key && column.value)) sorted = start;
        const names = columns.map(headCell);
        head.replaceChildren(element("tr", {}, ...names));
        markHead();
        drawBody();
      },
    };
  }

  function fillSelect(select, options) {
    select.replaceChildren(
      ...options.map(([value, label]) => element("option", { value }, label)),
    );
  }

  const unique = (values) => [...new Set(values)];
  const isBaseline = (system) =>
    system.kind === "trivial" || Boolean(system.control || system.diagnostic);
  const baselineClass = (system) => (isBaseline(system) ? "baseline" : "");

  const controlName = (system) => system.control?.replaceAll("_", " ");

  /** What tells a system from others of its model; the task only where the rest leaves it open. */
  function detail(system) {
    const same = systems.filter(
      (other) =>
        other.model === system.model &&
        other.scorer === system.scorer &&
        other.control === system.control,
    );
    const parts = [system.scorer, controlName(system), same.length > 1 ? system.task : undefined];
    return parts.filter(Boolean).join(" · ");
  }

  function systemCell(system, cell) {
    const line = element("small", {}, `${system.scorer} · ${system.task}`);
    cell.append(element("span", { className: "system" }, system.model), line);
    const diagnostic = system.diagnostic ? "diagnostic" : undefined;
    const tag = system.kind === "trivial" ? "trivial" : (controlName(system) ?? diagnostic);
    if (tag) line.append(element("span", { className: "tag" }, tag));
  }

  const systemColumn = {
    key: "system",
    label: "System",
    value: (system) => `${system.model} ${system.scorer} ${system.task}`,
    cell: systemCell,
  };

  // ---- Leaderboard and disciplines

  const { candidates, candidates_range: range } = report.paper_set;
  const most = candidates ?? range?.[1] ?? Infinity;
  // With no more than k candidates Hit@k is 1 by its k.
  const tells = (metric) => !metric.startsWith("hit@") || Number(metric.slice(4)) < most;
  const metrics = unique(systems.flatMap((system) => Object.keys(system.metrics ?? {}))).filter(
    tells,
  );
  // What judges alone have can be chosen, but takes no column of everybody's.
  const columnMetrics = metrics.filter((metric) => /^(hit@\d+|mrr|win_rate)$/.test(metric));
  const NO_NAME = "(none given)";
  const disciplines = Object.entries(report.paper_set.disciplines);
  const disciplineMetrics = unique(
    systems
      .flatMap((system) => Object.values(system.disciplines ?? {}))
      .flatMap((own) => Object.keys(own)),
  ).filter((key) => key !== "papers" && tells(key));
  const status = byId("leaderboard-status");

  const leaderboard = sortableTable(byId("leaderboard-table"), {
    rowClass: baselineClass,
    empty: "No system matches the filters.",
    onSort(label, descending) {
      describeShown(`Sorted by ${label}, ${descending ? "descending" : "ascending"}. `);
    },
  });
  const disciplineTable = sortableTable(byId("discipline-table"), {
    rowClass: baselineClass,
    empty: "No system matches the filters.",
  });

  const NO_METRIC = {};
  const measure = (system, metric) => system.metrics?.[metric] ?? NO_METRIC;
  const has = (pick) => systems.some((system) => pick(system) !== undefined);

  function leaderboardColumns(metric) {
    const name = metricName(metric);
    const columns = [
      systemColumn,
      {
        key: "chosen",
        label: name,
        numeric: true,
        descending: true,
        value: (system) => measure(system, metric).value,
        cell(system, cell) {
          const { value } = measure(system, metric);
          cell.classList.add("chosen");
          if (value !== undefined) cell.append(figureOf(metric, value));
        },
      },
      {
        key: "interval",
        label: "95\u202f% interval",
        spoken: "lower end of the interval",
        headClass: "bars",
        descending: true,
        value: (system) => measure(system, metric).low,
        cell(system, cell) {
          const measured = measure(system, metric);
          cell.className = "bars";
          if (measured.value === undefined) return;
          const text = element("small", { className: "interval" }, intervalOf(metric, measured));
          cell.append(bar(measured, chance[metric]), text);
        },
      },
    ];
    if (has((system) => system.tier)) {
      columns.push({
        key: "tier",
        label: "Tier",
        value: (system) => system.tier,
        cell(system, cell) {
          const { tier } = system;
          if (tier === undefined) return;
          cell.append(element("span", { className: "tier", "data-tier": tier }, String(tier)));
        },
      });
    }
    if (has((system) => system.rank_histogram)) {
      columns.push({
        key: "histogram",
        label: "Ranks of the gold",
        cell(system, cell) {
          if (system.rank_histogram) cell.append(histogram(system.rank_histogram));
        },
      });
    }
    for (const other of columnMetrics.filter((each) => each !== metric)) {
      columns.push({
        key: other,
        label: metricName(other),
        numeric: true,
        descending: true,
        value: (system) => measure(system, other).value,
        cell(system, cell) {
          const { value } = measure(system, other);
          if (value !== undefined) cell.append(figureOf(other, value));
        },
      });
    }
    if (has((system) => system.matched?.["hit@1"])) {
      columns.push({
        key: "matched",
        label: "Matched Hit@1",
        numeric: true,
        descending: true,
        value: (system) => system.matched?.["hit@1"]?.value,
        cell(system, cell) {
          const measured = system.matched?.["hit@1"];
          if (measured?.value === undefined) return;
          const interval = element("small", {}, intervalOf("hit@1", measured));
          cell.append(figureOf("hit@1", measured.value), interval);
        },
      });
    }
    if (has((system) => system.length_correlation)) {
      columns.push({
        key: "length",
        label: "Length ρ",
        numeric: true,
        descending: true,
        value: (system) => system.length_correlation?.value,
        cell(system, cell) {
          const { value } = system.length_correlation ?? NO_METRIC;
          if (value !== undefined) cell.append(minus(value.toFixed(2)));
        },
      });
    }
    columns.push({
      key: "papers",
      label: capitalised(units),
      numeric: true,
      descending: true,
      value: (system) => system.papers,
      cell(system, cell) {
        cell.append(String(system.papers));
        if (system.invalid) cell.append(element("small", {}, `${system.invalid} invalid`));
      },
    });
    return columns;
  }

  function disciplineColumns(metric) {
    const columns = disciplines.map(([name, papers]) => ({
      key: name,
      label: name || NO_NAME,
      head: () => element("span", {}, name || NO_NAME, element("small", {}, ` (${papers})`)),
      numeric: true,
      descending: true,
      value: (system) => system.disciplines?.[name]?.[metric]?.value,
      cell(system, cell) {
        const measured = system.disciplines?.[name]?.[metric];
        if (measured?.value === undefined) return;
        cell.classList.add("heat");
        cell.style.setProperty("--share", measured.value);
        const interval = element("small", {}, intervalOf(metric, measured));
        cell.append(figureOf(metric, measured.value), interval);
      },
    }));
    return [systemColumn, ...columns];
  }

  function selected() {
    const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    return systems.filter((system) => {
      const { model, scorer, task, paradigm } = system;
      const text = [model, scorer, task, paradigm].join(" ").toLowerCase();
      return (
        words.every((word) => text.includes(word)) &&
        [model, ""].includes(byId("model").value) &&
        [paradigm, ""].includes(byId("paradigm").value) &&
        (byId("baselines").checked || !isBaseline(system))
      );
    });
  }

  function describeShown(before = "") {
    const shown = selected().length;
    const what = shown === systems.length ? `${shown}` : `${shown} of ${systems.length}`;
    status.textContent = `${before}${what} systems.`;
  }

  function drawSystems() {
    const shown = selected();
    const start = { key: "chosen", descending: true };
    leaderboard.draw(leaderboardColumns(byId("metric").value), shown, start);
    drawDisciplines();
    describeShown();
  }

  function drawDisciplines() {
    const start = { key: undefined };
    const metric = byId("discipline-metric").value;
    const ordered = [...selected()].sort(byMetric(metric));
    disciplineTable.draw(disciplineColumns(metric), ordered, start);
  }

  function byMetric(metric) {
    const value = (system) => measure(system, metric).value ?? -1;
    return (first, second) => value(second) - value(first);
  }

  const named = (list) => list.map((metric) => [metric, metricName(metric)]);
  const choices = (key) => [
    ["", "all"],
    ...unique(systems.map((system) => system[key]).filter(Boolean)).map((value) => [value, value]),
  ];
  fillSelect(byId("metric"), named(metrics));
  fillSelect(byId("discipline-metric"), named(disciplineMetrics));
  fillSelect(byId("model"), choices("model"));
  fillSelect(byId("paradigm"), choices("paradigm"));
  byId("filters").addEventListener("input", drawSystems);
  // The fields have their first values only after the event.
  byId("filters").addEventListener("reset", () => setTimeout(drawSystems));
  byId("discipline-metric").addEventListener("input", drawDisciplines);

  // ---- Papers

  const papers = report.papers;
  const indexOf = (system) => systems.indexOf(system);
  // A pairwise judge, for one, has no ranks of all candidates.
  const ranking = systems.filter((_, index) =>
    papers.some((paper) => paper.candidates.some((candidate) => candidate.ranks[index] !== null)),
  );
  const leading = (() => {
    const models = ranking.filter((system) => !isBaseline(system));
    // One with a few valid papers is not among the best, whatever it reaches on these.
    const hits = (system) =>
      (system.compared ?? measure(system, report.settings.tier_metric)).value ?? -1;
    const best = models.sort((first, second) => hits(second) - hits(first)).slice(0, 5);
    const shortest = ranking.filter((system) => system.scorer === "shortest");
    return [...best, ...shortest].map(indexOf);
  })();
  let shownSystems;
  let current;

  const goldOf = (paper) => paper.candidates.find((candidate) => candidate.id === "gold");
  function nameOf({ title, paper_id: id, context = "" }) {
    if (title) return title;
    const name = /^\d+$/.test(id) ? `item ${id}` : id;
    const words = context.trim().replace(/\s+/g, " ");
    const start = words.length > 60 ? `${words.slice(0, 60)}…` : words;
    return start ? `${name}: ${start}` : name;
  }
  const haystacks = papers.map((paper) =>
    [paper.title, paper.paper_id, paper.doi, paper.discipline].join(" ").toLowerCase(),
  );
  const candidateTable = sortableTable(byId("candidate-table"), {
    rowClass: (candidate) => (candidate.id === "gold" ? "gold" : ""),
    below: (candidate) => candidate.text,
    empty: "No candidate.",
  });

  /** The gold's mean rank over the systems shown that rank it; undefined where none does. */
  function meanRank(paper) {
    const ranks = goldOf(paper).ranks;
    const known = shownSystems.map((index) => ranks[index]).filter((rank) => rank !== null);
    return known.length ? known.reduce((sum, rank) => sum + rank, 0) / known.length : undefined;
  }

  function listPapers() {
    const words = byId("paper-search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const discipline = byId("paper-discipline").value;
    const order = byId("paper-order").value;
    const found = papers
      .map((paper, index) => ({ paper, index, mean: meanRank(paper) }))
      .filter(
        ({ paper, index }) =>
          ["", `of ${paper.discipline}`].includes(discipline) &&
          words.every((word) => haystacks[index].includes(word)),
      );
    if (order !== "data") {
      const sign = order === "worst" ? -1 : 1;
      const key = ({ mean }) => (mean === undefined ? Infinity : sign * mean);
      found.sort((first, second) => key(first) - key(second) || first.index - second.index);
    }
    const list = byId("paper");
    fillSelect(
      list,
      found.map(({ paper, index, mean }) => [
        String(index),
        (mean === undefined ? DASH : mean.toFixed(1)) + "\u2002" + nameOf(paper),
      ]),
    );
    list.value = String(current);
    byId("paper-count").textContent =
      `(${found.length} of ${papers.length}; before each the gold’s mean rank)`;
    if (list.selectedIndex < 0 && found.length) show(found[0].index);
  }

  function show(index) {
    current = index;
    byId("paper").value = String(index);
    drawPaper();
  }

  function candidateColumns() {
    const columns = [
      {
        key: "id",
        label: "Candidate",
        value: (candidate) => candidate.id,
        cell: (candidate, cell) =>
          cell.append(candidate.id === "gold" ? "★ gold" : candidate.id.replace("_", " ")),
      },
      ...shownSystems.map(rankColumn),
    ];
    for (const [key, label] of [["tokens", "Tokens"], ["bytes", "Bytes"]]) {
      columns.push({
        key,
        label,
        numeric: true,
        value: (candidate) => candidate[key],
        cell(candidate, cell) {
          if (candidate[key] !== undefined) cell.append(String(candidate[key]));
        },
      });
    }
    return columns;
  }

  function rankColumn(index) {
    const system = systems[index];
    return {
      key: system.id,
      label: `${system.model} ${system.scorer}`,
      headClass: "system-head",
      head: () => element("span", {}, system.model, element("small", {}, detail(system))),
      numeric: true,
      value: (candidate) => candidate.ranks[index] ?? undefined,
      cell(candidate, cell) {
        const rank = candidate.ranks[index];
        const score = candidate.scores[index];
        if (rank !== null) {
          const first = rank === 1 ? "rank first" : "rank";
          cell.append(element("span", { className: first }, String(Math.round(100 * rank) / 100)));
        }
        if (score !== null) cell.append(element("small", {}, scoreText(score)));
      },
    };
  }

  function drawPaper() {
    const paper = papers[current];
    const { context } = paper;
    byId("paper-title").textContent = nameOf(paper);
    byId("paper-facts").textContent = [
      ...(paper.discipline ? [paper.discipline] : []),
      ...(paper.title ? [paper.paper_id] : []),
      ...(paper.doi ? [`doi ${paper.doi}`] : []),
      `${paper.candidates.length} candidates, the gold marked ★`,
    ].join(" · ");
    byId("paper-context").hidden = context === undefined;
    byId("paper-context").querySelector("p").textContent = context ?? "";
    const first = shownSystems.length ? systems[shownSystems[0]].id : "id";
    const start = { key: first, descending: false };
    candidateTable.draw(candidateColumns(), paper.candidates, start);
  }

  function step(by) {
    const list = byId("paper");
    const next = list.options[list.selectedIndex + by];
    if (next) show(Number(next.value));
  }

  function chooseSystems(indices) {
    shownSystems = indices;
    for (const box of byId("systems-shown").querySelectorAll("input")) {
      box.checked = indices.includes(Number(box.value));
    }
    const count = `Systems shown (${indices.length} of ${ranking.length})`;
    byId("systems-shown").querySelector("summary").textContent = count;
    if (!papers.length) return;
    listPapers();
    drawPaper();
  }

  byId("systems-shown").querySelector("fieldset").append(
    ...ranking.map((system) =>
      element(
        "label",
        { className: "check" },
        element("input", { type: "checkbox", value: String(indexOf(system)) }),
        element("span", {}, `${system.model} `, element("small", {}, detail(system))),
      ),
    ),
  );
  byId("systems-shown").addEventListener("input", () => {
    const boxes = [...byId("systems-shown").querySelectorAll("input:checked")];
    chooseSystems(boxes.map((box) => Number(box.value)));
  });
  const CHOICES = { leading, all: ranking.map(indexOf), none: [] };
  for (const button of byId("systems-shown").querySelectorAll("button")) {
    button.addEventListener("click", () => chooseSystems(CHOICES[button.dataset.choose]));
  }
  // The papers without a discipline are a choice of their own, beside all papers.
  fillSelect(byId("paper-discipline"), [
    ["", "all"],
    ...disciplines.map(([name]) => [`of ${name}`, name || NO_NAME]),
  ]);
  for (const id of ["paper-search", "paper-discipline", "paper-order"]) {
    byId(id).addEventListener("input", listPapers);
  }
  byId("paper").addEventListener("input", (event) => show(Number(event.target.value)));
  byId("previous").addEventListener("click", () => step(-1));
  byId("next").addEventListener("click", () => step(1));
  byId("full-text")?.addEventListener("input", (event) =>
    byId("candidate-table").classList.toggle("whole", event.target.checked),
  );
  for (const form of document.forms) {
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  // ---- Downloads

  function download(name, type, text) {
    const url = URL.createObjectURL(new Blob([text], { type }));
    element("a", { href: url, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  }

  /** Quotes what CSV must, and keeps a spreadsheet from running a name as a formula. */
  function csvCell(value) {
    if (value === undefined) return "";
    if (typeof value === "number") return String(value);
    const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  }

  function csv() {
    const names = ["model", "task", "scorer", "kind", "paradigm", "control"];
    const plain = [...names, "tier", "papers", "invalid"];
    const measured = [
      ...metrics.map((metric) => [metric, (system) => measure(system, metric)]),
      ["matched_hit@1", (system) => system.matched?.["hit@1"]],
      ["length_correlation", (system) => system.length_correlation],
    ];
    const head = [...plain, ...measured.flatMap(([name]) => [name, `${name}_low`, `${name}_high`])];
    const lines = systems.map((system) => [
      ...plain.map((key) => system[key]),
      ...measured.flatMap(([, pick]) => {
        const { value, low, high } = pick(system) ?? NO_METRIC;
        return [value, low, high];
      }),
    ]);
    return [head, ...lines].map((line) => line.map(csvCell).join(",") + "\r\n").join("");
  }

  byId("download-csv").addEventListener("click", () =>
    download("leaderboard.csv", "text/csv", csv()),
  );
  byId("download-json").addEventListener("click", () =>
    download("report.json", "application/json", JSON.stringify(report)),
  );

  // ---- First drawing

  for (const place of document.querySelectorAll("[data-bar]")) {
    const number = (name) => (place.dataset[name] ? Number(place.dataset[name]) : undefined);
    const [value, low, high] = [number("value"), number("low"), number("high")];
    place.append(bar(value === undefined ? undefined : { value, low, high }, number("chance")));
  }
  byId("papers").hidden = !papers.length;
  drawSystems();
  chooseSystems(leading);
})();

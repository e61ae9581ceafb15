"use strict";
{
  const root = document.documentElement;

  // Storage may be forbidden where the page is a file: then the choice lasts as long as the page is open.
  const storage = (use) => { try { return use(localStorage); } catch { return null; } };
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);

  const kept = storage((store) => store.getItem("neuboots-theme"));
  if (kept === "dark" || kept === "light") root.dataset.theme = kept; // before anything is painted
  root.classList.add("js");

  function make(tag, className, text) {
    const element = document.createElement(tag);
    if (tag === "button") element.type = "button";
    element.className = className;
    element.textContent = text;
    return element;
  }

  function addThemeButton() {
    const button = make("button", "theme", "");
    const name = () => { button.textContent = isDark() ? "Light" : "Dark"; };
    button.addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      storage((store) => store.setItem("neuboots-theme", root.dataset.theme));
      name();
    });
    system.addEventListener("change", name);
    name();
    button.setAttribute("aria-label", "Change between light and dark");
    document.body.append(button);
  }

  // Numbers by their value, then words, and last what is missing, whichever way it is sorted.
  const collator = new Intl.Collator("en", { numeric: true });
  function keyOf(cell) {
    const number = Number(cell.dataset.value ?? NaN), text = cell.textContent.trim();
    if (!Number.isNaN(number)) return { rank: 0, number, text };
    return { rank: text === "" || text === "–" ? 2 : 1, number, text };
  }
  function compare(a, b, sign) {
    if (a.rank !== b.rank) return a.rank - b.rank;
    if (a.rank === 0) return sign * (a.number < b.number ? -1 : a.number > b.number ? 1 : 0);
    return a.rank === 1 ? sign * collator.compare(a.text, b.text) : 0;
  }

  const NEXT = { none: "ascending", ascending: "descending", descending: "none" };
  function makeSortable(table) {
    const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0], first = [...body.rows];
    heads.forEach((head, column) => {
      const button = make("button", "", "");
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const way = NEXT[head.getAttribute("aria-sort") ?? "none"];
        heads.forEach((each) => each.removeAttribute("aria-sort"));
        let rows = first;
        if (way !== "none") {
          head.setAttribute("aria-sort", way);
          const keys = new Map(first.map((row) => [row, keyOf(row.cells[column])]));
          const sign = way === "ascending" ? 1 : -1;
          rows = first.toSorted((a, b) => compare(keys.get(a), keys.get(b), sign));
        }
        table.classList.toggle("sorted", way !== "none");
        body.append(...rows);
      });
    });
  }

  // A row's diagram is moved into the dialog and, when it closes, back to its place.
  function makeViewer() {
    const dialog = document.getElementById("viewer");
    dialog.className = "viewer";
    const ways = make("div", "ways", ""), place = document.createComment("");
    const steps = make("span", "steps", "");
    const previous = make("button", "previous", "← Previous"), next = make("button", "next", "Next →");
    const back = make("button", "back", "Back (Esc)");
    back.autofocus = true;
    steps.append(previous, " ", next);
    ways.append(back, steps);
    dialog.append(ways);
    let row = null;

    function putBack() {
      const figure = dialog.querySelector("figure");
      if (figure) place.replaceWith(figure);
    }
    function neighbour(step) {
      const rows = [...row.parentElement.rows].filter((each) => each.dataset.figure);
      return rows[(rows.indexOf(row) + step + rows.length) % rows.length];
    }
    function show(which) {
      const figure = document.getElementById(which.dataset.figure);
      if (!figure) return;
      putBack();
      row = which;
      figure.replaceWith(place);
      dialog.append(figure);
      steps.hidden = neighbour(1) === row;
      dialog.setAttribute("aria-label", figure.querySelector("figcaption").textContent);
      if (!dialog.open) dialog.showModal();
    }
    previous.addEventListener("click", () => show(neighbour(-1)));
    next.addEventListener("click", () => show(neighbour(1)));
    back.addEventListener("click", () => dialog.close());
    dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
    dialog.addEventListener("keydown", (event) => {
      if (event.key === "ArrowLeft") show(neighbour(-1));
      if (event.key === "ArrowRight") show(neighbour(1));
    });
    dialog.addEventListener("close", () => { putBack(); row.focus(); });
    return show;
  }

  function openFrom(row, show) {
    row.tabIndex = 0;
    row.querySelector("a").tabIndex = -1; // the row itself is in the order of keys
    row.addEventListener("click", (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey || String(getSelection())) return;
      event.preventDefault();
      show(row);
    });
    row.addEventListener("keydown", (event) => {
      if (event.target !== row || (event.key !== "Enter" && event.key !== " ")) return;
      event.preventDefault();
      show(row);
    });
  }

  function addCopyButton(command) {
    const code = command.querySelector("code"), button = make("button", "copy", "Copy");
    button.addEventListener("click", async () => {
      getSelection().selectAllChildren(code);
      try { await navigator.clipboard.writeText(code.textContent); } catch { document.execCommand("copy"); }
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
    command.append(button);
  }

  function followReading() {
    const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
    const observer = new IntersectionObserver((entries) => {
      for (const { isIntersecting, target } of entries) {
        if (!isIntersecting) continue;
        links.forEach((link) => link.removeAttribute("aria-current"));
        const link = links.get(target.id), list = link.closest("ol");
        link.setAttribute("aria-current", "true");
        list.scrollLeft = link.offsetLeft - list.offsetLeft - list.clientWidth / 3;
      }
    }, { rootMargin: "-15% 0px -75% 0px" });
    document.querySelectorAll("#top, .topic").forEach((part) => observer.observe(part));
  }

  document.addEventListener("DOMContentLoaded", () => {
    addThemeButton();
    const show = makeViewer();
    document.querySelectorAll("table").forEach(makeSortable);
    document.querySelectorAll("tr[data-figure]").forEach((row) => openFrom(row, show));
    document.querySelectorAll(".command").forEach(addCopyButton);
    followReading();
  });
}

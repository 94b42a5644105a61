"use strict";
/* Adds to drawn charts what a drawing can't do: the values under a pointer, lines that come and go, and a choice of
   panels. Everything is read from the page; nothing is fetched. */
(() => {
  const NS = "http://www.w3.org/2000/svg";
  const add = (parent, tag, attributes) => {
    const made = document.createElementNS(NS, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return parent.appendChild(made);
  };
  const text = (value, unit) => {
    if (unit === "share") return Number((100 * value).toPrecision(4)) + "\u00a0%";
    if (unit === "count") return Math.round(value).toLocaleString("en");
    return Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3)
      ? value.toPrecision(4) : String(Number(value.toPrecision(5)));
  };
  const place = (axis, value) => {
    const v = axis.log ? Math.log10(Math.max(value, 10 ** axis.low)) : value;
    return axis.first + (Math.min(Math.max(v, axis.low), axis.high) - axis.low) / (axis.high - axis.low)
      * (axis.last - axis.first);
  };
  const value = (axis, at) => {
    const v = axis.low + (at - axis.first) / (axis.last - axis.first) * (axis.high - axis.low);
    return axis.log ? 10 ** v : v;
  };
  const nearest = (xs, x) => xs.reduce((best, v, i) => Math.abs(v - x) < Math.abs(xs[best] - x) ? i : best, 0);

  for (const figure of document.querySelectorAll("figure.chart")) {
    const data = JSON.parse(figure.querySelector("script.data").textContent);
    const svgs = [...figure.querySelectorAll("svg.plot")];
    const hidden = new Set();
    const tip = figure.querySelector(".tip");
    for (const key of figure.querySelectorAll("button.key")) {
      const i = key.dataset.series;
      const set = (shown) => {
        key.setAttribute("aria-pressed", shown);
        hidden[shown ? "delete" : "add"](Number(i));
        for (const g of figure.querySelectorAll(`g.mark[data-series="${i}"]`)) g.classList.toggle("off", !shown);
      };
      set(key.getAttribute("aria-pressed") === "true");
      key.disabled = false;
      key.addEventListener("click", () => set(key.getAttribute("aria-pressed") !== "true"));
    }
    const choice = figure.querySelector("select.choice");
    if (choice) {
      const choose = () => svgs.forEach((svg, i) => { svg.closest(".panel").hidden = i !== Number(choice.value); });
      choice.disabled = false;
      choice.addEventListener("change", choose);
      choose();
    }
    svgs.forEach((svg, p) => {
      const panel = data[p];
      const layer = add(svg, "g", { class: "pointer", visibility: "hidden" });
      const rule = add(layer, "line", { y1: panel.y.first, y2: panel.y.last, class: "rule" });
      let at = null;
      const leave = () => { layer.setAttribute("visibility", "hidden"); tip.hidden = true; at = null; };
      const show = (x) => {
        at = Math.min(Math.max(x, panel.x.first), panel.x.last);
        const wanted = value(panel.x, at);
        for (const old of layer.querySelectorAll("circle")) old.remove();
        const rows = [];
        let where = null;
        for (const series of panel.series) {
          if (hidden.has(series.i) || !series.x.length) continue;
          let i, cx;
          if (series.kind === "bars") {
            i = series.x.findIndex((edge) => edge > wanted) - 1;
            if (i < 0) i = wanted < series.x[0] ? 0 : series.y.length - 1;
            where = where === null ? text(series.x[i], panel.x.unit) + " to " + text(series.x[i + 1], panel.x.unit) : where;
            cx = place(panel.x, (series.x[i] + series.x[i + 1]) / 2);
          } else {
            i = nearest(series.x, wanted);
            where = where === null ? text(series.x[i], panel.x.unit) : where;
            cx = place(panel.x, series.x[i]);
            add(layer, "circle", { cx, cy: place(panel.y, series.y[i]), r: 3.5, class: "dot" });
          }
          rows.push([series.name, text(series.y[i], panel.y.unit)]);
          rule.setAttribute("x1", cx);
          rule.setAttribute("x2", cx);
        }
        if (!rows.length) return leave();
        tip.replaceChildren();
        const head = tip.appendChild(document.createElement("b"));
        head.textContent = panel.x.label.split(" (")[0] + " " + where;
        for (const [name, shown] of rows) {
          const row = tip.appendChild(document.createElement("div"));
          row.appendChild(document.createElement("span")).textContent = name;
          row.appendChild(document.createElement("i")).textContent = shown;
        }
        tip.hidden = false;
        layer.setAttribute("visibility", "visible");
        const box = svg.getBoundingClientRect(), home = figure.getBoundingClientRect();
        const scale = box.width / svg.viewBox.baseVal.width;
        const x0 = box.left - home.left + at * scale;
        const left = x0 + 12 + tip.offsetWidth > home.width ? x0 - 12 - tip.offsetWidth : x0 + 12;
        tip.style.left = Math.max(0, left) + "px";
        tip.style.top = box.top - home.top + 6 + "px";
      };
      const follow = (event) => {
        const box = svg.getBoundingClientRect();
        show((event.clientX - box.left) * svg.viewBox.baseVal.width / box.width);
      };
      svg.addEventListener("pointermove", follow);
      svg.addEventListener("pointerdown", follow);
      svg.addEventListener("pointerleave", leave);
      svg.addEventListener("blur", leave);
      svg.addEventListener("keydown", (event) => {
        const move = { ArrowLeft: -8, ArrowRight: 8 }[event.key];
        if (move) {
          show((at === null ? (panel.x.first + panel.x.last) / 2 : at) + move);
          event.preventDefault();
        } else if (event.key === "Escape") leave();
      });
    });
  }
  for (const select of document.querySelectorAll("select.sets")) {
    const parts = [...select.closest("section").querySelectorAll("[data-set]")];
    const choose = () => parts.forEach((part) => { part.hidden = part.dataset.set !== select.value; });
    select.disabled = false;
    select.addEventListener("change", choose);
    choose();
  }
})();

"use strict";
(() => {
  const tip = document.getElementById("tip");
  const roles = ["system", "user", "tool", "assistant, not sampled", "sampled"];

  const row = (name, value, color) => {
    const line = document.createElement("div");
    if (color !== undefined) {
      const key = document.createElement("i");
      key.className = "key c" + color;
      line.append(key);
    }
    const label = document.createElement("span");
    label.textContent = name;
    const text = document.createElement("b");
    text.textContent = value;
    line.append(label, text);
    return line;
  };

  const show = (event, title, rows) => {
    const head = document.createElement("div");
    head.className = "head";
    head.textContent = title;
    tip.replaceChildren(head, ...rows);
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = Math.min(event.clientX + 14, innerWidth - box.width - 8);
    const below = event.clientY + 18;
    const top = below + box.height > innerHeight - 8 ? event.clientY - box.height - 12 : below;
    tip.style.left = Math.max(left, 8) + "px";
    tip.style.top = Math.max(top, 8) + "px";
  };

  const token = (event, cell) => {
    const [id, logprob, version, advantage, trainer] = cell.dataset.t.split("|");
    const role = roles[Number(cell.className.match(/\br(\d)/)[1])];
    const rows = [row("id", id), row("role", role)];
    if (logprob !== undefined) {
      const probability = (100 * Math.exp(Number(logprob))).toPrecision(3);
      rows.push(row("logprob", logprob + "  (" + probability + " %)"));
      if (trainer) rows.push(row("logprob of the trainer", trainer));
      if (advantage) rows.push(row("advantage", advantage));
      rows.push(row("policy version", version));
    }
    show(event, JSON.stringify(cell.textContent), rows);
  };

  const chart = (event, svg) => {
    const data = svg.hover || (svg.hover = JSON.parse(svg.dataset.hover));
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    let best = 0;
    data.x.forEach((value, i) => {
      if (Math.abs(value - x) < Math.abs(data.x[best] - x)) best = i;
    });
    const cursor = svg.querySelector(".cursor");
    cursor.setAttribute("x1", data.x[best]);
    cursor.setAttribute("x2", data.x[best]);
    cursor.classList.add("on");
    const rows = data.series
      .filter(([, , values]) => values[best] !== null)
      .map(([label, color, values]) => row(label, values[best], color));
    show(event, "step " + data.step[best], rows);
  };

  const move = (event) => {
    const cell = event.target.closest("[data-t]");
    const svg = event.target.closest("svg[data-hover]");
    document.querySelectorAll(".cursor.on").forEach((cursor) => cursor.classList.remove("on"));
    if (cell) token(event, cell);
    else if (svg) chart(event, svg);
    else tip.hidden = true;
  };
  document.addEventListener("pointermove", move);
  document.addEventListener("pointerdown", move);
  document.addEventListener("scroll", () => { tip.hidden = true; }, true);
})();

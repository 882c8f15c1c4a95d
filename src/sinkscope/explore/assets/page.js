"use strict";
// A tab's state lives here and goes with every request: two tabs cannot mix, and to undo is to go back to an earlier one.

class Pane {
  constructor(start, number) {
    this.start = start;
    this.root = document.getElementById("pane").content.cloneNode(true).firstElementChild;
    this.state = {
      source: Math.min(number, start.sources.length - 1), interventions: [], position: null, start: 0, quantity: "attention_received",
      prompt: start.prompts[number] ?? panes[0].state.prompt,
    };
    this.past = []; // earlier lists of interventions
    this.view = null;
    start.sources.forEach((source, at) => this.get(".source").append(element("option", { value: String(at) }, source.name)));
    for (const [name, meaning] of Object.entries(start.quantities)) this.get(".quantity").append(element("option", { value: name }, meaning));
    this.get(".prompt").value = this.state.prompt;
    this.get(".source").value = String(this.state.source);
    this.listen();
    this.ask();
  }

  get(selector) { return this.root.querySelector(selector); }
  get isLive() { return this.start.sources[this.state.source].is_live; }

  listen() {
    const on = (selector, event, answer) => this.get(selector).addEventListener(event, answer);
    on(".ask", "submit", (event) => { event.preventDefault(); this.read(); });
    on(".prompt", "keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.read(); });
    on(".source", "change", () => this.read());
    on(".undo", "click", () => { this.change({ interventions: this.past.pop() }); });
    on(".clear", "click", () => this.intervene([]));
    on(".quantity", "change", (event) => this.change({ quantity: event.target.value }));
    on(".change", "change", () => this.draw());
    for (const button of this.root.querySelectorAll("[data-kind]")) {
      const { kind } = button.dataset;
      button.addEventListener("click", () => this.add(kind, `${this.view.opened}${kind === "allow" ? `:0-${this.view.length - 1}` : ""}`));
    }
    on(".amplify", "input", (event) => {
      this.get(".tools-of-token output").textContent = event.target.value;
      this.amplify(event.target.value);
    });
    on(".earlier", "click", () => this.change({ start: Math.max(0, this.view.start - this.view.window) }));
    on(".later", "click", () => this.change({ start: this.view.start + this.view.window }));
    on(".place", "change", (event) => this.change({ start: Number(event.target.value) * this.view.window }));
    on(".copy", "click", () => navigator.clipboard.writeText(this.view.python));
    on(".tokens", "keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      const next = step && (step < 0 ? event.target.previousElementSibling : event.target.nextElementSibling);
      if (next) { next.focus(); event.preventDefault(); }
    });
  }

  // A new prompt or model begins without interventions: positions and neurons mean something else there.
  read() {
    this.past = [];
    this.change({ prompt: this.get(".prompt").value, source: Number(this.get(".source").value), interventions: [], position: null, start: 0 });
  }

  add(kind, text) {
    if (!this.state.interventions.some(([otherKind, otherText]) => otherKind === kind && otherText === text)) this.intervene([...this.state.interventions, [kind, text]]);
  }

  // One amplification a token; a slide is one step back, however many values it passes.
  amplify(factor) {
    const at = `${this.view.opened}:`;
    const others = this.state.interventions.filter(([kind, text]) => !(kind === "amplify" && text.startsWith(at)));
    const interventions = Number(factor) === 1 ? others : [...others, ["amplify", at + factor]];
    const slides = this.sliding === at && this.past.length;
    this.intervene(interventions, !slides);
    this.sliding = at;
  }

  intervene(interventions, remember = true) {
    this.sliding = null;
    if (remember) this.past.push(this.state.interventions);
    this.change({ interventions });
  }

  change(fields) {
    if (!("interventions" in fields)) this.sliding = null;
    Object.assign(this.state, fields);
    this.ask();
  }

  // One request at a time; what changed meanwhile is asked for once it is answered.
  async ask() {
    if (this.asking) { this.again = true; return; }
    this.asking = true;
    this.root.setAttribute("aria-busy", "true");
    try {
      do {
        this.again = false;
        await this.request(structuredClone(this.state));
      } while (this.again);
    } finally {
      this.asking = false;
      this.root.removeAttribute("aria-busy");
      this.root.dataset.answered = String(Number(this.root.dataset.answered || 0) + 1);
    }
  }

  async request(state) {
    let answer, content;
    try {
      answer = await fetch("view", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(state) });
      content = await answer.json();
    } catch {
      this.say(answer ? "The server failed; its terminal says why." : "No answer: sinkscope explore has ended.");
      return;
    }
    if (answer.ok) {
      this.view = content;
      this.accepted = { state, past: [...this.past] };
      this.say("");
      this.draw();
    } else {
      this.say(content.message);
      if (answer.status === 503) {
        await new Promise((done) => setTimeout(done, 500));
        this.again = true;
      } else if (!this.again && this.accepted) { // what was refused is taken back
        this.state = structuredClone(this.accepted.state);
        this.past = [...this.accepted.past];
        this.draw();
      }
    }
  }

  say(text) { this.get(".message").textContent = text; }

  draw() {
    const view = this.view;
    if (!view) return;
    this.get(".answer").textContent = view.story;
    this.get(".before").textContent = view.story_before === null ? "" : `Baseline: ${view.story_before}`;
    this.drawInterventions();
    this.drawTokens();
    const text = view.opened_text ? ` ${view.opened_text}` : "";
    this.get("legend").replaceChildren(`Token ${view.opened}`, element("bdi", {}, text));
    this.get(".tools-of-token").disabled = !this.isLive;
    this.get(".prompt-of").hidden = this.get(".read").hidden = !this.isLive; // a finished trace has its own tokens
    const factor = this.state.interventions.find(([kind, what]) => kind === "amplify" && what.startsWith(`${view.opened}:`));
    if (document.activeElement !== this.get(".amplify")) {
      this.get(".amplify").value = this.get(".tools-of-token output").textContent = factor ? factor[1].split(":")[1] : "1";
    }
    this.get(".chain").replaceChildren(...view.chain.map(drawPanel));
    const change = this.get(".change").checked;
    this.get(".change").disabled = view.map.before === null;
    this.get(".heads-caption").textContent = `Attention that token ${view.opened} receives from each head.`;
    drawMap(this.get(".heads"), view.heads, { quantity: "attention_received", label: "Layer by head", change, columns: (at) => `head ${at}` });
    drawMap(this.get(".positions"), view.map, {
      quantity: view.map.quantity, label: "Layer by position", change,
      columns: (at) => `${view.start + at} ${view.tokens[at]}`, choose: (at) => this.change({ position: view.start + at }),
    });
    this.drawParts();
    this.get(".code").hidden = view.python === null;
    this.get(".python").textContent = view.python ?? "";
    document.documentElement.dataset.drawn = "yes";
  }

  drawInterventions() {
    const { interventions } = this.state;
    this.get(".interventions").replaceChildren(...interventions.map(([kind, text], at) => {
      const name = `${kind.replaceAll("_", " ")} ${text}`;
      const out = element("button", { "aria-label": `Remove ${name}` }, "\u00d7");
      out.addEventListener("click", () => this.intervene(interventions.filter((_, other) => other !== at)));
      return element("li", {}, `${name} `, out);
    }));
    this.get(".undo").disabled = !this.past.length;
    this.get(".clear").disabled = !interventions.length;
  }

  drawTokens() {
    const { tokens, received, sink_rate, start, opened, length, window } = this.view;
    const place = this.get(".tokens");
    const focused = place.contains(document.activeElement) ? document.activeElement.dataset.position : null;
    place.replaceChildren(...tokens.map((text, at) => {
      const now = received.now[at], by = received.before === null ? 0 : now - received.before[at];
      const button = element("button", { "data-position": String(start + at), "aria-pressed": String(start + at === opened) },
        element("span", { class: "position" }, String(start + at)), element("bdi", {}, text || "\u00b7"),
        element("span", { class: "number" }, now === null ? shown(now) : now.toFixed(3)));
      if (Math.abs(by) >= 0.0005) button.lastChild.append(` ${by < 0 ? "\u2212" : "+"}${Math.abs(by).toFixed(3)}`);
      button.title = `position ${start + at}: receives ${shown(now)}, sink for ${shown(sink_rate.now[at])} of heads`;
      button.style.setProperty("--share", `${100 * Math.sqrt(Math.min(1, now || 0))}%`);
      button.addEventListener("click", () => this.change({ position: start + at }));
      return button;
    }));
    if (focused !== null) place.querySelector(`[data-position="${focused}"]`)?.focus();
    const parts = Math.ceil(length / window);
    this.get(".pager").hidden = parts < 2;
    this.get(".place").max = String(parts - 1);
    this.get(".place").value = String(start / window);
    this.get(".earlier").disabled = start === 0;
    this.get(".later").disabled = start + window >= length;
    this.get(".part").textContent = `${start} to ${start + tokens.length - 1} of ${length.toLocaleString("en")} tokens`;
  }

  drawParts() {
    const { neurons, dimensions, opened } = this.view;
    const row = (what, part, value, actions) => {
      const state = part.state && ` (${part.state})`;
      const buttons = actions.filter(Boolean).map(([label, kind, text]) => {
        const button = element("button", { disabled: !this.isLive, "aria-label": `${label}: ${what}` }, label);
        button.addEventListener("click", () => this.add(kind, text));
        return button;
      });
      return element("tr", {}, element("td", {}, what + state), element("td", {}, String(part.position)),
        element("td", { class: "number" }, value), element("td", {}, ...buttons));
    };
    // The value in the baseline, where it differs.
    const was = (part, now) => part.before === null || shown(part.before) === shown(now) ? "" : `, was ${shown(part.before)}`;
    const rows = neurons.map((neuron) => {
      const name = [neuron.layer, neuron.expert, neuron.neuron].filter((part) => part !== null).join(":");
      return row(`neuron ${name} ${neuron.role} dimension ${neuron.dimension}`, neuron, shown(neuron.activation) + (neuron.write_share === null ? "" : ` (${Math.round(100 * neuron.write_share)} %)`) + was(neuron, neuron.activation), [
        ["Remove", "ablate", name],
        opened !== neuron.position && [`Copy to token ${opened}`, "transplant", `${name}@${neuron.position}:${opened}`],
      ]);
    });
    for (const part of dimensions) {
      const { dimension, position } = part;
      rows.push(row(`dimension ${dimension}, most in layer ${part.layer}`, part, `${shown(part.value)} (${shown(part.ratio)} x mean)${was(part, part.value)}`, [
        ["Remove", "zero_dimension", `${dimension}@${position}`],
        opened !== position && [`Copy to token ${opened}`, "transplant_dimension", `${dimension}@${position}:${opened}`],
      ]));
    }
    this.get(".parts tbody").replaceChildren(...rows);
    const cut = [["neurons", neurons], ["dimensions", dimensions]].filter(([name, listed]) => listed.length < this.view.counts[name]);
    this.get(".parts-cut").textContent = cut.map(([name, listed]) => `The first ${listed.length} of ${this.view.counts[name]} ${name}.`).join(" ");
  }
}

const panes = [];
function theme(name) {
  document.documentElement.dataset.theme = name;
  document.getElementById("theme").textContent = name === "dark" ? "Light theme" : "Dark theme";
  panes.forEach((pane) => pane.draw()); // canvases hold colours
}

async function begin() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  theme(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => theme(dark.matches ? "dark" : "light"));
  document.getElementById("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  const start = await (await fetch("start")).json();
  const open = () => {
    panes.push(new Pane(start, panes.length));
    document.getElementById("main").append(panes.at(-1).root);
    document.getElementById("compare").setAttribute("aria-pressed", String(panes.length > 1));
    document.getElementById("main").classList.toggle("two", panes.length > 1);
  };
  document.getElementById("compare").addEventListener("click", () => {
    if (panes.length < 2) return open();
    panes.pop().root.remove();
    document.getElementById("compare").setAttribute("aria-pressed", "false");
    document.getElementById("main").classList.remove("two");
  });
  open();
  if (start.sources.length > 1 || start.prompts.length > 1) open();
}

begin();

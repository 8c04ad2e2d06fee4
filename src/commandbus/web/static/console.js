// The console's own script: times in the viewer's zone, the live part of "Now", and keys. The pages work without it.
"use strict";

const RETRY_MILLISECONDS = 3000;
const GO_ON_MILLISECONDS = 1000;

// Today's times have no date, and this year's dates have no year.
function short(moment, now) {
  const time = { hour: "2-digit", minute: "2-digit", second: "2-digit" };
  if (moment.toDateString() === now.toDateString()) return moment.toLocaleTimeString(undefined, time);
  const year = moment.getFullYear() === now.getFullYear() ? {} : { year: "numeric" };
  return moment.toLocaleString(undefined, { day: "numeric", month: "short", ...year, ...time });
}

function showLocalTimes(within) {
  for (const one of within.querySelectorAll("time[datetime]")) {
    const moment = new Date(one.dateTime);
    if (Number.isNaN(moment.getTime()) || one.title) continue;
    one.title = one.textContent;
    one.textContent = short(moment, new Date());
  }
}

// Marks on the axes of charts, and moments in graphs.
function showLocalTicks(within) {
  for (const one of within.querySelectorAll("text[data-at]")) {
    const time = { hour: "2-digit", minute: "2-digit" };
    showInSvg(one, new Date(one.dataset.at).toLocaleTimeString(undefined, time));
  }
  for (const one of within.querySelectorAll("text[data-moment]")) {
    showInSvg(one, short(new Date(one.dataset.moment), new Date()));
  }
}

// An element of SVG shows on hover what its <title> says.
function showInSvg(one, text) {
  const utc = document.createElementNS(one.namespaceURI, "title");
  utc.textContent = one.textContent;
  one.textContent = text;
  one.append(utc);
}

function watchNow() {
  const live = document.getElementById("live");
  if (!live) return;
  const trouble = document.getElementById("trouble");
  const events = new EventSource(live.dataset.events);
  const tell = (text) => {
    trouble.textContent = text;
    trouble.hidden = !text;
    live.classList.toggle("stale", Boolean(text));
  };
  events.onmessage = (event) => {
    tell("");
    if (live.contains(document.activeElement)) return; // do not take away what somebody is about to use
    const made = new DOMParser().parseFromString(event.data, "text/html");
    live.replaceChildren(...made.body.childNodes);
    showLocalTimes(live);
  };
  events.addEventListener("trouble", (event) => tell(event.data + ". What is shown is from before."));
  events.onerror = () => tell("The console does not answer. What is shown is from before.");
}

// A page that the database could not give opens by itself when the database answers again.
function openWhenPossible() {
  if (!document.querySelector("main[data-retry]")) return;
  const look = async () => {
    const answer = await fetch(location.href).catch(() => null);
    if (answer && answer.status !== 503) location.reload();
    else setTimeout(look, RETRY_MILLISECONDS);
  };
  setTimeout(look, RETRY_MILLISECONDS);
}

// A part that changes by itself (`data-refresh`: seconds) is read again, and the whole page when that part has ended.
function refreshParts() {
  const part = document.querySelector("[data-refresh]");
  if (!part) return;
  setTimeout(async () => {
    try {
      const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
      const made = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById(part.id);
      if (answer.ok && made && !made.dataset.refresh) return location.reload();
      if (answer.ok && made) part.replaceChildren(...made.childNodes);
    } catch { /* the console does not answer now: asked again */ }
    refreshParts();
  }, 1000 * Number(part.dataset.refresh));
}

function listenForKeys() {
  let afterG = false;
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select")) return;
    const page = afterG && document.querySelector(`.menu a[data-key="${CSS.escape(event.key)}"]`);
    const search = document.getElementById("search");
    if (page) location.href = page.href;
    else if (event.key === "/" && search) { search.focus(); event.preventDefault(); }
    else if (event.key === "?") document.getElementById("help")?.showModal();
    afterG = event.key === "g";
  });
}

// A text that is made to be copied has a button, if the browser can copy.
function offerCopies() {
  if (!navigator.clipboard) return;
  for (const button of document.querySelectorAll("button[data-copy]")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      const text = document.getElementById(button.dataset.copy).textContent;
      button.textContent = await navigator.clipboard.writeText(text).then(() => "Copied", () => "Not copied");
    });
  }
}

// A list with boxes has one for all of them, and says how many are selected.
function countSelection() {
  const all = document.querySelector("input[data-all]");
  if (!all) return;
  const boxes = [...document.querySelectorAll(`input[name="${CSS.escape(all.dataset.all)}"]`)];
  const told = document.querySelector(`[data-count="${CSS.escape(all.dataset.all)}"]`);
  if (!boxes.length) return;
  all.hidden = false;
  const count = () => {
    const chosen = boxes.filter((box) => box.checked).length;
    all.checked = chosen === boxes.length;
    all.indeterminate = chosen > 0 && !all.checked;
    if (told) told.textContent = chosen ? `${chosen} selected.` : "";
  };
  all.addEventListener("change", () => { for (const box of boxes) box.checked = all.checked; count(); });
  for (const box of boxes) box.addEventListener("change", count);
  count(); // a browser may bring back what was selected before
}

// A search that has not seen all goes on by itself, says how far it is, and can be stopped.
function keepLooking() {
  const part = document.querySelector("[data-continue]");
  const found = document.getElementById("found");
  if (!part || !found) return;
  const [stop, told, link] = ["[data-stop]", "[data-reached]", "a.more"].map((one) => part.querySelector(one));
  const events = new EventSource(part.dataset.continue);
  const end = (text) => { events.close(); stop.hidden = true; if (text) told.append(` ${text}`); };
  stop.hidden = false;
  stop.addEventListener("click", () => end("Stopped."));
  events.addEventListener("rows", (event) => {
    const made = new DOMParser().parseFromString(`<table><tbody>${event.data}</tbody></table>`, "text/html");
    found.querySelector("[data-empty]")?.remove();
    found.append(...made.querySelectorAll("tr"));
    showLocalTimes(found);
  });
  events.addEventListener("reached", (event) => {
    told.replaceChildren(...new DOMParser().parseFromString(event.data, "text/html").body.childNodes);
    showLocalTimes(told);
    const next = new URL(link.href);
    if (event.lastEventId) next.searchParams.set("cursor", event.lastEventId);
    link.href = next.href;
    link.hidden = !event.lastEventId;
  });
  events.addEventListener("end", () => end(""));
  events.addEventListener("trouble", (event) => end(event.data));
  events.onerror = () => end("The console does not answer.");
}

// An action that is done in portions goes on by itself. Only the answer to an operator's own form has such a page.
function goOn() {
  const form = document.querySelector("form[data-goes-on]");
  if (!form) return;
  const stop = form.querySelector("[data-stop]");
  const timer = setTimeout(() => form.requestSubmit(), GO_ON_MILLISECONDS);
  stop.hidden = false;
  stop.addEventListener("click", () => { clearTimeout(timer); stop.hidden = true; });
}

showLocalTimes(document);
showLocalTicks(document);
goOn();
keepLooking();
countSelection();
offerCopies();
watchNow();
openWhenPossible();
refreshParts();
listenForKeys();

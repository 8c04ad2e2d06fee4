// The console's own script: times in the viewer's zone, the live part of "Now", and keys. The pages work without it.
"use strict";

const RETRY_MILLISECONDS = 3000;

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

showLocalTimes(document);
offerCopies();
watchNow();
openWhenPossible();
refreshParts();
listenForKeys();

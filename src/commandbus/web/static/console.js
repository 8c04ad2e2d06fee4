// The console's own script: times in the viewer's zone, the live part of "Now", and keys. The pages work without it.
"use strict";

const root = document.body.dataset.root || "";

function showLocalTimes(within) {
  for (const one of within.querySelectorAll("time[datetime]")) {
    const moment = new Date(one.dateTime);
    if (Number.isNaN(moment.getTime()) || one.title) continue;
    one.title = one.textContent;
    one.textContent = moment.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });
  }
}

function watchNow() {
  const live = document.getElementById("live");
  if (!live) return;
  const trouble = document.getElementById("trouble");
  const events = new EventSource(live.dataset.events);
  const tell = (text) => { trouble.textContent = text; trouble.hidden = !text; };
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

function listenForKeys() {
  const pages = { n: "/", c: "/commands", t: "/troubleshooting", l: "/limits", w: "/workers" };
  let afterG = false;
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select")) return;
    if (afterG && pages[event.key]) location.href = root + pages[event.key];
    else if (event.key === "/") { document.getElementById("search")?.focus(); event.preventDefault(); }
    else if (event.key === "?") document.getElementById("help").showModal();
    afterG = event.key === "g";
  });
}

showLocalTimes(document);
watchNow();
listenForKeys();

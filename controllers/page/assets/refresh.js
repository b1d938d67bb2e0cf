"use strict";
// Loads the page again and replaces its content, so that scroll position and focus remain. A hidden
// page is not loaded. Key "/" moves the focus to the search field.
(() => {
  const seconds = Number(document.currentScript.dataset.seconds);
  const live = document.getElementById("live");
  const busy = () => {
    const main = document.getElementById("main"), active = document.activeElement, chosen = getSelection();
    return document.hidden || (main.contains(active) && active.matches("input")) || (chosen && !chosen.isCollapsed);
  };
  const reload = async () => {
    if (busy()) return;
    try {
      const response = await fetch(location.href, { headers: { Accept: "text/html" } });
      const next = new DOMParser().parseFromString(await response.text(), "text/html");
      const main = document.getElementById("main"), fresh = next.getElementById("main");
      if (!fresh || busy()) return;
      const scrolls = [...main.querySelectorAll(".scroll")].map((e) => e.scrollLeft);
      const href = main.contains(document.activeElement) && document.activeElement.getAttribute("href");
      main.replaceChildren(...fresh.childNodes);
      main.querySelectorAll(".scroll").forEach((e, i) => { e.scrollLeft = scrolls[i] || 0; });
      if (href) main.querySelector(`a[href="${CSS.escape(href)}"]`)?.focus({ preventScroll: true });
      document.title = next.title;
      if (live) live.textContent = "updated " + new Date().toISOString().slice(11, 19) + "Z";
      document.body.classList.remove("stale");
    } catch {
      document.body.classList.add("stale");
      if (live) live.textContent = "Posthorn does not answer; these data are old";
    }
  };
  setInterval(reload, seconds * 1000);
  document.addEventListener("visibilitychange", reload);
  document.addEventListener("keydown", (e) => {
    if (e.key === "/" && !e.ctrlKey && !e.metaKey && !document.activeElement.matches("input")) {
      e.preventDefault();
      document.querySelector(".find input").focus();
    }
  });
})();

// Names and tab stops that the theme leaves out, for screen readers and for scrolling by keys.
function complete() {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  document.querySelectorAll("pre > code, .md-typeset__scrollwrap").forEach((element) => { element.tabIndex = 0; });
  document.querySelectorAll(".md-code__nav").forEach((nav, i) => nav.setAttribute("aria-label", `Code ${i + 1}`));
}
new MutationObserver(complete).observe(document.documentElement, { childList: true, subtree: true });

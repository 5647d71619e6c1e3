// One tooltip for all tokens; arrow keys go from token to token.
"use strict";
{
  const tip = document.getElementById("tip");
  let shown = null;

  // Without a script, the browser shows titles; with one, only the tooltip does.
  for (const token of document.querySelectorAll(".tokens [title]")) {
    token.dataset.tip = token.title;
    token.removeAttribute("title");
  }

  const place = () => {
    const at = shown.getClientRects()[0];
    const room = document.documentElement;
    const left = Math.min(at.left, room.clientWidth - tip.offsetWidth - 8);
    const isBelow = at.bottom + tip.offsetHeight + 8 < room.clientHeight;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${isBelow ? at.bottom + 4 : at.top - tip.offsetHeight - 4}px`;
  };

  const show = (token) => {
    shown?.removeAttribute("aria-describedby");
    shown = token;
    tip.hidden = !token;
    if (!token) return;
    tip.textContent = token.dataset.tip;
    token.setAttribute("aria-describedby", "tip");
    place();
  };

  const tokenAt = (element) => element?.closest?.("[data-tip]") ?? null;

  // Of an answer, only the token that was visited last is a stop of the Tab key.
  const go = (token) => {
    token.closest(".tokens").querySelector("[tabindex='0']").tabIndex = -1;
    token.tabIndex = 0;
    token.focus();
  };

  document.addEventListener("mouseover", (event) => {
    show(tokenAt(event.target) ?? tokenAt(document.activeElement));
  });
  document.addEventListener("focusin", (event) => show(tokenAt(event.target)));
  document.addEventListener("focusout", () => show(null));
  document.addEventListener("click", (event) => {
    const token = tokenAt(event.target);
    if (token) go(token);
  });
  const follow = () => shown && place();
  document.addEventListener("scroll", follow, { capture: true, passive: true });
  addEventListener("resize", follow);

  const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 };
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") show(null);
    const token = tokenAt(event.target);
    if (!token) return;
    const all = [...token.closest(".tokens").querySelectorAll("[data-tip]")];
    const last = all.length - 1;
    let next = all.indexOf(token) + (moves[event.key] ?? NaN);
    if (event.key === "Home") next = 0;
    if (event.key === "End") next = last;
    if (Number.isNaN(next)) return;
    event.preventDefault();
    go(all[Math.max(0, Math.min(last, next))]);
  });
}

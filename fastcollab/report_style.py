"""The report's style sheet: light and dark, from 320 px up. Text keeps a contrast of at least 4.5 with its ground."""

CSS = """
:root {
  color-scheme: light dark;
  --bg: #ffffff; --card: #f6f7f9; --text: #1b1f24; --soft: #57606a; --line: #d8dde3;
  --c0: #0a58a8; --c1: #a63c06; --c2: #6b32b8; --c3: #0d6b4d; --c4: #9b1c5a;
  --c5: #7a5200; --c6: #00626e; --c7: #4a4f57;
  --t0: #e2eefb; --t1: #fdebdd; --t2: #efe6fb; --t3: #dff3ea; --t4: #fbe4ef;
  --cut: #d0556b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --bg: #14171b; --card: #1d2127; --text: #e6e9ed; --soft: #a3adb8; --line: #363d46;
    --c0: #82bdff; --c1: #ffb185; --c2: #cdadff; --c3: #7ddcb4; --c4: #ff9fca;
    --c5: #e8c15a; --c6: #6fd6e3; --c7: #b9c0c9;
    --t0: #152c47; --t1: #43240f; --t2: #32224d; --t3: #12362a; --t4: #45182f;
    --cut: #d8637a;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--text); font: 16px/1.5 system-ui, "Segoe UI", Roboto, sans-serif;
  -webkit-text-size-adjust: 100%; }
main { max-width: 1120px; margin: 0 auto; padding: 32px 20px 64px; }
header p { margin: 0; color: var(--soft); overflow-wrap: anywhere; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 19px; margin: 40px 0 14px; padding-bottom: 6px; border-bottom: 1px solid var(--line); }
h3 { font-size: 16px; margin: 22px 0 10px; overflow-wrap: anywhere; }

.scroll { overflow-x: auto; margin-bottom: 18px; max-width: max-content; }
.scroll:focus-visible { outline: 2px solid var(--c0); outline-offset: 2px; }
table { border-collapse: collapse; font-size: 15px; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: 6px; }
th, td { padding: 6px 18px 6px 0; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; font-weight: 400; white-space: normal; min-width: 110px; }
th:last-child, td:last-child { padding-right: 0; }
thead th, thead td { color: var(--soft); font-weight: 600; }

figure { margin: 0; min-width: 0; display: grid; grid-row: span 4; grid-template-rows: subgrid; gap: 0;
  padding-bottom: 28px; }
figcaption { font-weight: 600; font-size: 15px; line-height: 1.35; }
.unit { color: var(--soft); font-weight: 400; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 330px), 1fr)); gap: 0 36px; }
.wide { display: grid; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 18px; margin: 4px 0 8px; padding: 0;
  font-size: 14px; }
.legend li { overflow-wrap: anywhere; min-width: 0; }
.legend b { font-weight: 600; font-variant-numeric: tabular-nums; }
.swatch { vertical-align: 1px; margin-right: 5px; }
.plot { display: grid; grid-template: 170px 18px auto / 48px 1fr; font-size: 12px; color: var(--soft);
  font-variant-numeric: tabular-nums; padding: 6px 14px 0 0; }
.wide .plot { grid-template-rows: 270px 18px auto; }
.plot .y { grid-area: 1 / 1; position: relative; }
.plot .y span { position: absolute; right: 8px; transform: translateY(-50%); line-height: 1; }
.plot .x { grid-area: 2 / 2; position: relative; }
.plot .x span { position: absolute; top: 5px; transform: translateX(-50%); line-height: 1; }
.plot .xl { grid-area: 3 / 2; text-align: center; line-height: 1.4; }
.plot svg { grid-area: 1 / 2; width: 100%; height: 100%; display: block; overflow: hidden;
  border-left: 1px solid var(--line); }
.plot svg *, .swatch * { fill: none; stroke-width: 2; stroke-linejoin: round; vector-effect: non-scaling-stroke; }
.plot svg .grid { stroke: var(--line); stroke-width: 1; }
.plot svg .raw { stroke-width: 1; opacity: .4; stroke-dasharray: none; }
.plot svg .dot { stroke-width: 9; stroke-linecap: round; stroke-dasharray: none; }
svg .c0 { stroke: var(--c0); }
svg .c1 { stroke: var(--c1); stroke-dasharray: 7 4; }
svg .c2 { stroke: var(--c2); stroke-dasharray: 2 3; }
svg .c3 { stroke: var(--c3); stroke-dasharray: 9 3 2 3; }
svg .c4 { stroke: var(--c4); stroke-dasharray: 12 5; }
svg .c5 { stroke: var(--c5); stroke-dasharray: 1 5; }
svg .c6 { stroke: var(--c6); stroke-dasharray: 14 3 2 3 2 3; }
svg .c7 { stroke: var(--c7); stroke-dasharray: 4 8; }
.plot svg .bars { fill-opacity: .25; }
.plot svg .bars.c0 { fill: var(--c0); }
.plot svg .bars.c1 { fill: var(--c1); }
.plot svg .bars.c2 { fill: var(--c2); }
.plot svg .bars.c3 { fill: var(--c3); }
.plot svg .bars.c4 { fill: var(--c4); }
.plot svg .bars.c5 { fill: var(--c5); }
.plot svg .bars.c6 { fill: var(--c6); }
.plot svg .bars.c7 { fill: var(--c7); }
.note { margin: 4px 0 0; font-size: 13px; color: var(--soft); }

.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 300px), 1fr)); gap: 16px; }
article { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: 12px 14px;
  min-width: 0; }
.facts { display: flex; flex-wrap: wrap; gap: 0 12px; margin: 0 0 8px; font-size: 13px; color: var(--soft); }
.facts b { color: var(--text); }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 14px/1.75 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
pre.scroll { position: relative; max-height: 640px; overflow-y: auto; margin: 0; max-width: none; }
.prompt { color: var(--soft); }
.w0, .w1, .w2, .w3, .w4 { text-decoration-line: underline; text-decoration-thickness: 2px; text-underline-offset: 3px;
  text-decoration-skip-ink: none; }
.w0 { color: var(--c0); background: var(--t0); text-decoration-style: solid; }
.w1 { color: var(--c1); background: var(--t1); text-decoration-style: dotted; }
.w2 { color: var(--c2); background: var(--t2); text-decoration-style: double; }
.w3 { color: var(--c3); background: var(--t3); text-decoration-style: dashed; }
.w4 { color: var(--c4); background: var(--t4); text-decoration-style: wavy; text-decoration-thickness: 1px; }
del { color: var(--soft); text-decoration: line-through 1px var(--cut); text-decoration-skip-ink: none; }
.sr { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap;
  user-select: none; }

dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 300px), 1fr)); gap: 0 28px; margin: 0;
  font-size: 14px; }
dl div { display: flex; justify-content: space-between; gap: 12px; padding: 4px 0; border-bottom: 1px solid var(--line);
  min-width: 0; }
dt { color: var(--soft); }
dd { margin: 0; text-align: right; overflow-wrap: anywhere; min-width: 0; font-variant-numeric: tabular-nums; }
"""

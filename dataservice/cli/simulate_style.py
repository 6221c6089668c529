"""The style sheet of the simulation's page.

Invariants: colours of series are Okabe and Ito's, told apart by readers who do not see all colours;
shades of the heat map are cividis, even in lightness; nothing is loaded from elsewhere.
"""

from __future__ import annotations

_CIVIDIS = (
    *("#00224e", "#0a2f6b", "#2a3f6d", "#414d6b", "#555b6c", "#696970"),
    *("#7d7876", "#938979", "#aa9a73", "#c3ac69", "#dcbf57", "#fee838"),
)

_LIGHT = """
  --page: #fafaf8; --card: #ffffff; --ink: #1c1e21; --faint: #5c6270; --edge: #e3e3de;
  --arrival: #1c1e21; --local: #8a6d00; --budget_2d: #cc5f9b; --nbin_v1: #0f87c4;
  --nbin_v2: #d55e00; --two_pass: #00805f; --balanced: #1f4fd8; --track: #ecece6;
"""
_DARK = """
  --page: #14161a; --card: #1c1f25; --ink: #eceef2; --faint: #a0a7b4; --edge: #30343d;
  --arrival: #eceef2; --local: #e5c100; --budget_2d: #e58ac0; --nbin_v1: #56b4e9;
  --nbin_v2: #ff8433; --two_pass: #1fc995; --balanced: #7ea2ff; --track: #2b2f38;
"""
_SERIES = ("arrival", "local", "budget_2d", "nbin_v1", "nbin_v2", "two_pass", "balanced")
_DASHES = {"local": "5 3", "budget_2d": "2 3", "nbin_v1": "8 3 2 3", "nbin_v2": "1 3"}

STYLE = (
    f":root {{ color-scheme: light dark; {_LIGHT} }}\n"
    f"@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}\n"
    """
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 48px; }
h1 { font-size: 28px; line-height: 1.2; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 0 0 10px; }
h3 { font-size: 14px; margin: 14px 0 6px; font-weight: 600; }
.lead { color: var(--faint); margin: 4px 0 18px; }
.warning { border-left: 4px solid var(--nbin_v2); padding: 6px 12px; margin: 0 0 14px; }
section { background: var(--card); border: 1px solid var(--edge); border-radius: 10px;
  padding: 16px 18px; margin: 0 0 16px; min-width: 0; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 16px; align-items: start; }
.tiles { display: grid; grid-template-columns: repeat(4, 1fr); gap: 12px; margin: 0 0 16px; }
.tiles div { background: var(--card); border: 1px solid var(--edge); border-radius: 10px;
  padding: 12px 16px; display: flex; flex-direction: column-reverse; justify-content: flex-end; }
.tiles dt { color: var(--faint); font-size: 13px; line-height: 1.3; }
.tiles dd { margin: 0; font-size: 26px; font-weight: 650; font-variant-numeric: tabular-nums; }
figure { margin: 0; }
figcaption { color: var(--faint); font-size: 13px; margin-top: 8px; }
.plot { display: block; width: 100%; height: auto; font-size: 12.5px; }
.plot text { fill: var(--ink); font-variant-numeric: tabular-nums; }
.plot .axis { fill: var(--faint); }
.plot .grid { stroke: var(--edge); stroke-width: 1; }
.line { fill: none; stroke: var(--c); stroke-width: 2; }
.mark { fill: var(--c); stroke: var(--card); stroke-width: 1; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 16px; padding: 0;
  margin: 6px 0 0; font-size: 13px; }
.legend li { display: flex; align-items: center; gap: 6px; }
.key { width: 26px; height: 14px; flex: none; }
.track { fill: var(--track); }
.bar { fill: var(--nbin_v1); }
.bar.ours { fill: var(--balanced); }
.histogram rect { fill: var(--c); }
.mean { stroke: var(--ink); stroke-width: 1.2; stroke-dasharray: 3 2; }
.heat { display: grid; grid-template-columns: 18px 1fr; gap: 2px 6px; }
.heat .rows { writing-mode: vertical-rl; transform: rotate(180deg); text-align: center;
  font-size: 12px; line-height: 18px; color: var(--faint); white-space: nowrap; overflow: hidden; }
.heat .columns { grid-column: 2; display: flex; justify-content: space-between; font-size: 12px;
  color: var(--faint); }
.cells { display: block; width: 100%; border-radius: 3px; shape-rendering: crispEdges; }
.cells .row { fill: #fff; fill-opacity: 0; }
.cells .row:hover { fill-opacity: .18; }
.shades { display: flex; flex-wrap: wrap; gap: 4px 14px; font-size: 12.5px; margin: 12px 0 0; }
.shades span { display: inline-flex; align-items: center; gap: 5px; }
.shades i { width: 18px; height: 12px; border-radius: 2px; display: inline-block; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 11px 6px 0; text-align: right; vertical-align: bottom; }
td { white-space: nowrap; }
thead th { color: var(--faint); font-weight: 500; font-size: 12.5px; }
tbody tr { border-top: 1px solid var(--edge); }
tbody th, thead th:first-child { text-align: left; font-weight: 500; }
tbody th { white-space: nowrap; }
.words { margin: 0; font-size: 14px; }
ul.words { padding-left: 18px; }
ul.words li { margin-bottom: 6px; }
.words dt { font-weight: 600; margin-top: 8px; }
.words dd { margin: 0; color: var(--faint); }
@media (max-width: 760px) {
  main { padding: 18px 12px 36px; }
  .pair { grid-template-columns: 1fr; gap: 0; }
  .tiles { grid-template-columns: 1fr 1fr; }
  .tiles dd { font-size: 22px; }
  section { padding: 14px 12px; }
  .plot { font-size: 14px; }
}
"""
    + "".join(f".s-{name} {{ --c: var(--{name}); }}\n" for name in _SERIES)
    + "".join(
        f".s-{name} .line {{ stroke-dasharray: {dash}; }}\n" for name, dash in _DASHES.items()
    )
    + "".join(f".p-{name} {{ --c: var(--{name}); }}\n" for name in _SERIES)
    + ".p-lbf { --c: var(--two_pass); }\n"
    + "".join(
        f".q{shade} {{ fill: {colour}; background: {colour}; }}\n"
        for shade, colour in enumerate(_CIVIDIS)
    )
)

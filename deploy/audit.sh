#!/usr/bin/env bash
# Asks whether any version in requirements.lock has a known vulnerability; ends with 1 if one has.
#
# The answers come from the advisories of the package index that pip uses. Where those cannot be
# had, for all packages or for some, it says so and ends well: nothing was found, nothing is proven.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'audit: %s\n' "$*" >&2; }

python="${PYTHON:-.venv/bin/python}"
lock="${1:-requirements.lock}"
report="$(mktemp)"
trap 'rm -f "$report"' EXIT

ask=("$python" -m pip_audit --requirement "$lock" --no-deps --disable-pip --progress-spinner off
  --timeout 20 --format json --output "$report")
if ! said="$(timeout 300 "${ask[@]}" 2>&1)" && [ ! -s "$report" ]; then
  say "NOT AUDITED: pip-audit has no answer: $(tail -n 1 <<<"$said")"
  exit 0
fi

"$python" - "$report" "$lock" <<'PY'
import json
import sys

with open(sys.argv[1], encoding="utf-8") as file:
    packages = json.load(file)["dependencies"]
unknown = [one["name"] for one in packages if "skip_reason" in one]
known = len(packages) - len(unknown)
vulnerable = [one for one in packages if one.get("vulns")]
for package in vulnerable:
    for found in package["vulns"]:
        fixed = ", ".join(found["fix_versions"]) or "no version yet"
        print(f"audit: {package['name']} {package['version']}: {found['id']}, fixed in {fixed}")
if not known:
    print(f"audit: NOT AUDITED: the index has no advisories for any of {len(packages)} packages")
elif unknown:
    print(f"audit: {known} packages looked at; NOT AUDITED: {', '.join(unknown)}")
if vulnerable:
    sys.exit(f"audit: {len(vulnerable)} packages of {sys.argv[2]} are vulnerable; move them there")
if known:
    print(f"audit: no known vulnerability in {known} packages")
PY

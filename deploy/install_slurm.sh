#!/usr/bin/env bash
# Installs Debian's Slurm and munge, with which the tests run the scripts of deploy/slurm on machines of
# their own, and shellcheck. No daemon of them is started.
#
# Needs root and apt-get. Where it cannot install it says so and ends well: those tests then skip,
# and say why.
set -euo pipefail

programs=(slurmctld slurmd srun munged shellcheck)
packages=(slurmctld slurmd slurm-client munge shellcheck)

say() { printf 'slurm: %s\n' "$*" >&2; }

missing=()
PATH=$PATH:/usr/sbin
for name in "${programs[@]}"; do
  command -v "$name" >/dev/null || missing+=("$name")
done
if [ ${#missing[@]} -eq 0 ]; then
  say "$(command -v slurmctld) is here, and what goes with it"
  exit 0
fi
if ! command -v apt-get >/dev/null; then
  say "no ${missing[*]}, and no apt-get to install them with; tests that need them will skip"
  exit 0
fi
if [ "$(id -u)" != 0 ]; then
  say "no ${missing[*]}, and only root may install them: sudo apt-get install ${packages[*]};" \
    "tests that need them will skip"
  exit 0
fi

# Debian asks this file whether a package may start its daemons; 101: it may not.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  trap 'rm -f "$policy"' EXIT
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod +x "$policy"
fi
install=(env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${packages[@]}")
say "installing ${packages[*]} (about 30 MB)"
if "${install[@]}" >/dev/null 2>&1 || { apt-get update -q >/dev/null 2>&1 && "${install[@]}" >/dev/null 2>&1; }; then
  say "$(command -v slurmctld) is here"
else
  say "apt-get could not install them; tests that need them will skip"
fi

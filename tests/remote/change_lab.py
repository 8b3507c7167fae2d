"""A root folder with a systemctl of its own, for the programs that change a machine: run as a machine would run them."""

from __future__ import annotations

import os
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from proofbook.model import Command, Result

#: systemctl as far as the programs use it: a unit is a file that holds its ActiveState, every call is a line in `calls`.
_SYSTEMCTL = r"""#!/bin/sh
ulimit -S -f unlimited
here=${0%/*}/..
echo "$*" >> "$here/calls"
[ ! -f "$here/deaf" ] || exit 1
verb= unit=
for word; do
  case $word in
    --*) ;;
    *) if [ -z "$verb" ]; then verb=$word; else unit="$unit $word"; fi ;;
  esac
done
etc=$PROOFBOOK_TEST_ROOT/etc/systemd/system
state() { cat "$here/active/$1" 2> /dev/null || echo inactive; }
for unit in ${unit:-.}; do
  case $verb in
    show)
      for word; do case $word in
        --property=ActiveState) echo "ActiveState=$(state "$unit")" ;;
        --property=SubState) echo "SubState=waiting" ;;
        --property=LoadState) [ -f "$etc/$unit" ] && echo LoadState=loaded || echo LoadState=not-found ;;
        --property=UnitFileState) [ -L "$etc/timers.target.wants/$unit" ] && echo UnitFileState=enabled || echo UnitFileState= ;;
      esac; done ;;
    enable) mkdir -p "$etc/timers.target.wants"; ln -sf "$etc/$unit" "$etc/timers.target.wants/$unit" ;;
    disable) rm -f "$etc/timers.target.wants/$unit" ;;
    is-active) [ "$(state "$unit")" = active ] ;;
    is-enabled) [ -L "$etc/timers.target.wants/$unit" ] ;;
    start | restart)
      [ ! -f "$here/refuse" ] || case $unit in proofbook-*) ;; *) echo "Job for $unit failed." >&2; exit 1 ;; esac
      case $unit in
        proofbook-guard-*.service)
          id=${unit#proofbook-guard-}; id=${id%.service}
          sh "$PROOFBOOK_TEST_ROOT/var/lib/proofbook/changes/$id/guard.sh" due "$id" 9<&- || exit 1 ;;
        *) echo active > "$here/active/$unit" ;;
      esac ;;
    is-system-running) cat "$here/manager" 2> /dev/null || echo running ;;
    stop) rm -f "$here/active/$unit" ;;
  esac
done
"""
#: A tool that does its work and then, at the given call of any of them, lets the power go out.
_MORTAL = r"""#!/bin/sh
n=$(($(cat {count}) + 1)); echo $n > {count}
[ "$n" != "$(cat {last})" ] || [ "$(cat {when})" = after ] || kill -9 0
{tool} "$@"; status=$?
[ "$n" != "$(cat {last})" ] || kill -9 0
exit $status
"""
TOOLS = ("mv", "cp", "ln", "rm", "mkdir", "chmod", "chown", "sync", "rmdir")


class Root:
    """``root`` is what the programs take for ``/``; ``etc`` holds the files that are changed."""

    def __init__(self, root: Path, shell: list[str] | None = None) -> None:
        self.root, self.shell = root, shell or ["dash"]
        self.fake, self.bin = root / "fake", root / "fake" / "bin"
        for folder in ("var/lib", "etc/systemd/system", "proc/sys/kernel/random", "proc/1", "fake/bin", "fake/active"):
            (root / folder).mkdir(parents=True)
        self.script("systemctl", _SYSTEMCTL)
        self.calls_file = self.fake / "calls"
        self.calls_file.write_text("")
        self.boot("11111111-1111-1111-1111-111111111111")

    @property
    def etc(self) -> Path:
        return self.root / "etc/systemd/system"

    @property
    def proofbook(self) -> Path:
        return self.root / "var/lib/proofbook"

    def script(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def boot(self, boot_id: str, *, started: int = 17, uptime: float = 1000.0) -> None:
        """Begin a life of the machine, or of a container on it (``started``: when its systemd was)."""
        (self.root / "proc/sys/kernel/random/boot_id").write_text(boot_id + "\n")
        fields = " ".join(["S", *["0"] * 18, str(started), *["0"] * 30])
        (self.root / "proc/1/stat").write_text(f"1 (systemd) {fields}\n")
        self.uptime(uptime)

    def uptime(self, seconds: float) -> None:
        (self.root / "proc/uptime").write_text(f"{seconds:.2f} 0.00\n")

    def wall(self, shift_s: int) -> None:
        """Step the wall clock: `date` without -d is off by so much from now on."""
        date = shutil.which("date")
        self.script(
            "date",
            f'#!/bin/sh\ncase " $* " in *" -d "*) exec {date} "$@" ;; esac\n'
            f'for last; do :; done\nexec {date} -u -d "@$(($({date} +%s) + ({shift_s})))" "$last"\n',
        )

    def active(self, unit: str, state: str) -> None:
        (self.fake / "active" / unit).write_text(state + "\n")

    def is_active(self, unit: str) -> str:
        file = self.fake / "active" / unit
        return file.read_text().strip() if file.exists() else "inactive"

    def calls(self) -> list[str]:
        """What systemctl was asked since the last time."""
        said = self.calls_file.read_text().splitlines()
        self.calls_file.write_text("")
        return said

    def mortal(self, call: int, when: str = "after") -> None:
        """At the ``call``-th use of a tool that writes, everything dies, as when the power goes."""
        for name, value in (("count", "0"), ("last", str(call)), ("when", when)):
            (self.fake / name).write_text(value)
        for tool in TOOLS:
            where = {name: self.fake / name for name in ("count", "last", "when")}
            self.script(tool, _MORTAL.format(tool=shutil.which(tool), **where))

    def immortal(self) -> int:
        """Put the true tools back; how many uses there were."""
        for tool in TOOLS:
            (self.bin / tool).unlink(missing_ok=True)
        return int((self.fake / "count").read_text())

    @property
    def environment(self) -> dict[str, str]:
        return {"PATH": f"{self.bin}:{os.environ['PATH']}", "PROOFBOOK_TEST_ROOT": str(self.root)}

    def run(self, asked: Command) -> Result:
        argv = [*self.shell, *asked.argv[1:]]
        done = subprocess.run(
            argv, input=asked.stdin, capture_output=True, timeout=60, check=False, env=self.environment, start_new_session=True
        )
        return Result(asked, done.returncode, done.stdout, done.stderr, datetime.now(UTC), 0.0)

    def due(self, run_id: str) -> subprocess.CompletedProcess[bytes]:
        """What the timer runs."""
        program = self.proofbook / "changes" / run_id / "guard.sh"
        return subprocess.run(
            [*self.shell, str(program), "due", run_id], capture_output=True, timeout=60, check=False, env=self.environment,
            start_new_session=True,
        )  # fmt: skip

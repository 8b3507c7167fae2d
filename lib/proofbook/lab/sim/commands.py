"""The table of commands of a simulated machine, and those that reach into its kernel, its GPUs and its containers."""

from __future__ import annotations

import asyncio
import posixpath
import re
from collections.abc import Awaitable
from dataclasses import replace
from datetime import UTC, datetime
from urllib.parse import urlsplit

from proofbook.lab.sim import agents, coreutils, serving, storage
from proofbook.lab.sim.journalctl import journalctl
from proofbook.lab.sim.os_state import Container
from proofbook.lab.sim.render_nvidia import nvidia_smi
from proofbook.lab.sim.render_pci import lspci
from proofbook.lab.sim.shell import Answer, Context, Handler, Shell, said, write_file
from proofbook.lab.sim.systemctl import systemctl
from proofbook.lab.standin import arguments
from proofbook.lab.standin.engine import Reply

_HOST_ONLY = ("pct", "lspci", "modinfo", "lsinitramfs", "pveversion")


def make_shell() -> Shell:
    """A shell with everything that the lab's machines know."""
    shell = Shell({})

    async def sh(ctx: Context, argv: list[str]) -> Answer:
        """``sh -c TEXT [NAME ARGUMENTS]``: a known program is answered from the state, other text is run."""
        words = [a for a in argv[1:] if a not in ("-l", "-e", "-u", "-x", "-eu")]
        if words[:1] == ["-lc"]:
            words[0] = "-c"
        if words[:1] != ["-c"] or len(words) < 2:
            return (
                await shell.run_text(ctx, ctx.stdin.decode("utf-8", "replace"))
                if not words
                else said(error=f"{argv[0]}: 0: cannot open {words[0]}\n", status=2)
            )
        if program := agents.recognise(words[1]):
            return await _awaited(program(ctx, words[3:]))
        return await shell.run_text(replace(ctx, env=dict(ctx.env), positional=tuple(words[2:]) or ("sh",)), words[1])

    async def python3(ctx: Context, argv: list[str]) -> Answer:
        if argv[1:2] == ["-c"] and len(argv) > 2 and (program := agents.recognise(argv[2])):
            return await _awaited(program(ctx, argv[3:]))
        if argv[1:] in (["-V"], ["--version"]):
            return said("Python 3.13.5\n")
        if serving.is_sglang(argv) and {"-h", "--help"} & set(argv):
            await ctx.until(lambda: False, 6.0)
            version, columns = ctx.system.packages.get("sglang", "0.5.10"), ctx.env.get("COLUMNS", "80")
            return said(arguments.help_text(version, int(columns)))
        ctx.note_unknown(" ".join(argv))
        return said(error="lab: this simulated machine runs no Python programs\n", status=127)

    async def sudo(ctx: Context, argv: list[str]) -> Answer:
        words = argv[1:]
        while words and words[0].startswith("-"):
            if words.pop(0) == "--":
                break
        if not ctx.user.sudo:
            return said(error="sudo: a password is required\n", status=1)
        return await shell.run_argv(ctx, words) if words else said(error="usage: sudo command\n", status=1)

    async def runuser(ctx: Context, argv: list[str]) -> Answer:
        words = argv[1:]
        while words and words[0].startswith("-"):
            if (word := words.pop(0)) == "--":
                break
            if word in ("-u", "--user"):
                words.pop(0)
        return await shell.run_argv(ctx, words) if words else said(error="runuser: no command was specified\n", status=1)

    async def timeout(ctx: Context, argv: list[str]) -> Answer:
        words = argv[1:]
        while words and words[0].startswith("-"):
            if words.pop(0) in ("-k", "-s"):
                words.pop(0)
        limit = float(words.pop(0).rstrip("s"))
        try:
            return await asyncio.wait_for(shell.run_argv(ctx, words), limit or None)
        except TimeoutError:
            return said(status=124)

    async def prefixed(ctx: Context, argv: list[str]) -> Answer:
        """``nice``, ``setsid``, ``stdbuf``, ``env A=b CMD``: run the command behind their own words."""
        words = argv[1:]
        env = dict(ctx.env)
        while words and (words[0].startswith("-") or "=" in words[0]):
            name, equals, value = words.pop(0).partition("=")
            if equals:
                env[name] = value
        return await shell.run_argv(replace(ctx, env=env), words) if words else coreutils.COMMANDS["env"](ctx, argv)  # type: ignore[return-value]

    def command(ctx: Context, argv: list[str]) -> Answer | Awaitable[Answer]:
        if argv[1:2] in (["-v"], ["-V"]):
            return coreutils.COMMANDS["which"](ctx, argv[1:])
        return shell.run_argv(ctx, argv[1:])

    async def xargs(ctx: Context, argv: list[str]) -> Answer:
        words = [a for a in argv[1:] if not a.startswith("-")] or ["echo"]
        return await shell.run_argv(replace(ctx, stdin=b""), [*words, *ctx.stdin.decode().split()])

    async def pct(ctx: Context, argv: list[str]) -> Answer:
        return await _pct(shell, ctx, argv)

    table: dict[str, Handler] = {
        **coreutils.COMMANDS,
        **storage.COMMANDS,
        "sh": sh,
        "bash": sh,
        "dash": sh,
        "python3": python3,
        "python": python3,
        "sudo": sudo,
        "timeout": timeout,
        "nice": prefixed,
        "ionice": prefixed,
        "setsid": prefixed,
        "stdbuf": prefixed,
        "env": prefixed,
        "command": command,
        "type": command,
        "xargs": xargs,
        "runuser": runuser,
        "pct": pct,
        "journalctl": journalctl,
        "systemctl": systemctl,
        "nvidia-smi": _nvidia_smi,
        "lspci": _lspci,
        "modinfo": _modinfo,
        "lsinitramfs": _lsinitramfs,
        "dmesg": _dmesg,
        "curl": _curl,
        "ss": _ss,
        "fincore": _fincore,
        "lsmod": _lsmod,
        "systemd-detect-virt": _detect_virt,
        "reboot": _reboot,
        "pveversion": _pveversion,
        "lxc-ls": _lxc_ls,
    }
    shell.commands = {name: (_on_host(handler) if name in _HOST_ONLY else handler) for name, handler in table.items()}
    coreutils.set_known(frozenset(shell.commands) - {"exit", "logout"})
    return shell


async def _awaited(answer: Answer | Awaitable[Answer]) -> Answer:
    return answer if isinstance(answer, Answer) else await answer


def _on_host(handler: Handler) -> Handler:
    """The command exists on the host alone."""

    def guarded(ctx: Context, argv: list[str]) -> Answer | Awaitable[Answer]:
        if isinstance(ctx.system, Container):
            return said(error=f"sh: 1: {argv[0]}: not found\n", status=127)
        return handler(ctx, argv)

    return guarded


# ------------------------------------------------------------------------------------------- hardware


def _nvidia_smi(ctx: Context, argv: list[str]) -> Answer:
    inside = isinstance(ctx.system, Container)
    if isinstance(ctx.system, Container) and ctx.system.devices.get("/dev/nvidiactl", "ENOENT"):
        return said("Failed to initialize NVML: Unknown Error\n", status=255)
    hw = ctx.life.machine.hw
    if inside:
        reached = {g.pci for g in ctx.life.machine.gpus_of(ctx.system)}
        hw = replace(hw, gpus={pci: g for pci, g in hw.gpus.items() if pci in reached})
    now = datetime.fromtimestamp(ctx.life.now, UTC)
    return Answer(*nvidia_smi(hw, argv[1:], now, in_container=inside))


def _lspci(ctx: Context, argv: list[str]) -> Answer:
    return Answer(*lspci(ctx.life.machine.hw, argv[1:]))


def _lsinitramfs(ctx: Context, argv: list[str]) -> Answer:
    """What is in the image: built when the files of modprobe.d were as they are now."""
    image = argv[-1]
    if not ctx.tree.exists(image):
        return said(error=f"lsinitramfs: '{image}': No such file or directory\n", status=1)
    kernel = ctx.life.machine.kernel
    names = [".", "conf", "conf/initramfs.conf", "etc", "etc/modprobe.d"]
    names += [path.removeprefix("/") for path in ctx.tree.glob("/etc/modprobe.d/*.conf")]
    names += ["init", f"usr/lib/modules/{kernel}", f"usr/lib/modules/{kernel}/kernel/fs/zfs/zfs.ko"]
    return said("".join(f"{name}\n" for name in names))


def _modinfo(ctx: Context, argv: list[str]) -> Answer:
    nvidia, kernel = ctx.life.machine.hw.nvidia, ctx.life.machine.kernel
    words = [a for a in argv[1:] if not a.startswith("-") and a not in ("version", "srcversion", "filename", "license")]
    name = words[-1] if words else ""
    if name not in ("nvidia", "nvidia_uvm", "nvidia-uvm", "nvidia_drm"):
        return said(error=f"modinfo: ERROR: Module {name} not found.\n", status=1)
    values = {
        "filename": f"/lib/modules/{kernel}/updates/dkms/{name}.ko",
        "version": nvidia.disk_version,
        "license": "Dual MIT/GPL" if nvidia.open_module else "NVIDIA",
        "srcversion": nvidia.disk_srcversion,
        "vermagic": f"{kernel} SMP preempt mod_unload modversions ",
    }
    options = " ".join(argv[1:])
    if found := re.search(r"(?:-F\s*|--field[= ])(\w+)", options):
        return said(values.get(found[1], "") + "\n" if found[1] in values else "")
    return said("".join(f"{k + ':':<16}{v}\n" for k, v in values.items()))


def _lsmod(ctx: Context, argv: list[str]) -> Answer:
    rows = [line.split() for line in ctx.tree.read("/proc/modules").decode().splitlines()]
    return said("Module                  Size  Used by\n" + "".join(f"{n:<20}{s:>9}  {u}\n" for n, s, u, *_ in rows))


def _dmesg(ctx: Context, argv: list[str]) -> Answer:
    if ctx.user.uid != 0:
        return said(error="dmesg: read kernel buffer failed: Operation not permitted\n", status=1)
    options = " ".join(argv[1:])
    boot = ctx.life.machine.boot
    out = []
    for line in boot.kernel_log:
        at = datetime.fromtimestamp(boot.started_at + line.monotonic_s, UTC)
        if "-T" in options or "ctime" in options:
            stamp = f"[{at:%a %b %e %H:%M:%S %Y}] "
        elif "iso" in options:
            stamp = at.strftime("%Y-%m-%dT%H:%M:%S,%f+00:00 ")
        else:
            stamp = f"[{line.monotonic_s:12.6f}] "
        if "-x" in options:
            stamp = f"kern  :{('emerg', 'alert', 'crit', 'err', 'warn', 'notice', 'info', 'debug')[line.priority]:<6}: " + stamp
        out.append(stamp + line.text + "\n")
    return said("".join(out))


def _detect_virt(ctx: Context, argv: list[str]) -> Answer:
    return said("lxc\n") if isinstance(ctx.system, Container) else said("none\n", status=1)


async def _reboot(ctx: Context, argv: list[str]) -> Answer:
    return await systemctl(ctx, ["systemctl", "reboot"])


def _pveversion(ctx: Context, argv: list[str]) -> Answer:
    return said(f"pve-manager/9.1.2/9d436f37a0ac4172 (running kernel: {ctx.life.machine.kernel})\n")


# ------------------------------------------------------------------------------------------ containers


def _lxc_ls(ctx: Context, argv: list[str]) -> Answer:
    return said(" ".join(ctx.life.machine.containers) + "\n")


async def _pct(shell: Shell, ctx: Context, argv: list[str]) -> Answer:
    if ctx.user.uid != 0:
        return said(error="please run as root\n", status=255)
    containers = ctx.life.machine.containers
    verb, rest = (argv[1], argv[2:]) if len(argv) > 1 else ("help", [])
    if verb == "list":
        rows = "".join(f"{c.id:<10} {_status(c):<10} {'':<12} {c.hostname:<20}\n" for c in containers.values())
        return said(f"{'VMID':<10} {'Status':<10} {'Lock':<12} {'Name':<20}\n" + rows)
    if verb not in ("status", "config", "exec", "start", "stop", "shutdown", "reboot"):
        ctx.note_unknown(" ".join(argv))
        return said(error=f"ERROR: unknown command 'pct {verb}'\n", status=255)
    container = containers.get(rest[0]) if rest else None
    if container is None:
        where = f"nodes/{ctx.life.machine.name}/lxc/{rest[0] if rest else ''}.conf"
        return said(error=f"Configuration file '{where}' does not exist\n", status=2)
    if verb == "status":
        return said(f"status: {_status(container)}\n")
    if verb == "config":
        return said(container.config)
    if verb in ("stop", "shutdown", "reboot", "start"):
        return _power(ctx, container, verb)
    words = rest[1:]
    while words and words[0].startswith("-"):
        if words.pop(0) == "--":
            break
    if container.state == "off":
        return said(error=f"CT {container.id} not running!\n", status=255)
    inner = replace(ctx, system=container, cwd="/root", env={"PATH": ctx.env.get("PATH", ""), "HOME": "/root", "USER": "root"})
    if words and words[0] not in shell.commands and "/" not in words[0]:
        ctx.note_unknown(" ".join(argv))
        return said(
            error=f"lxc-attach: {container.id}: ../src/lxc/attach.c: lxc_attach_run_command: 1843 No such file or directory - "
            f'Failed to exec "{words[0]}"\n',
            status=127,
        )
    return await shell.run_argv(inner, words)


def _status(container: Container) -> str:
    return "stopped" if container.state == "off" else "running"


def _power(ctx: Context, container: Container, verb: str) -> Answer:
    if verb in ("stop", "shutdown", "reboot"):
        ctx.life.on_stop_container(container.id)
    if verb == "start" and container.state != "off":
        return said(error=f"CT {container.id} already running\n", status=255)
    if verb in ("start", "reboot"):
        ctx.life.on_start_container(container.id)
    ctx.life.machine.revision += 1
    return said()


# -------------------------------------------------------------------------------------------- network


async def request(ctx: Context, port: int, method: str, path: str, body: bytes, limit_s: float) -> Reply | None:
    """What a port of this userland answers after its time; a reply that hangs when it does not come; None when refused."""
    found = serving.server_at(ctx.system, port)
    if found is None:
        return None
    process, server = found
    counts, pid = serving.generates(method, path), process.pid
    running = ctx.system.running
    running[pid] = running.get(pid, 0) + counts
    try:
        reply = serving.respond(ctx.life, ctx.system, process, server, method, path, body, "127.0.0.1:44012")
        due = ctx.life.now + reply.seconds

        def over() -> bool:
            return ctx.system.processes.get(pid) is not process or (not reply.hangs and ctx.life.now >= due)

        came = await ctx.until(over, limit_s if reply.hangs else min(limit_s, reply.seconds))
    finally:
        if pid in running:
            running[pid] -= counts
    if reply.hangs or not came or ctx.system.processes.get(pid) is not process:
        return Reply(hangs=True)
    return reply


async def _curl(ctx: Context, argv: list[str]) -> Answer:
    url, output, form, fail, quiet = "", "", "", False, False
    method, data, limit = "", b"", 300.0
    words = argv[1:]
    while words:
        word = words.pop(0)
        if word in ("-o", "--output"):
            output = words.pop(0)
        elif word in ("-w", "--write-out"):
            form = words.pop(0)
        elif word in ("-m", "--max-time"):
            limit = float(words.pop(0))
        elif word in ("-X", "--request"):
            method = words.pop(0)
        elif word in ("-d", "--data", "--data-raw", "--json"):
            data = words.pop(0).encode()
        elif word in ("--connect-timeout", "-H", "--header"):
            words.pop(0)
        elif word.startswith("-"):
            fail = fail or word in ("-f", "--fail") or (word[1] != "-" and "f" in word)
            quiet = quiet or (word[1] != "-" and "s" in word and "S" not in word)
        else:
            url = word
    parts = urlsplit(url if "//" in url else "http://" + url)
    local = parts.hostname in ("127.0.0.1", "localhost", "::1", ctx.system.hostname, ctx.system.address)
    port = parts.port or 80
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    method = method or ("POST" if data else "GET")
    reply = await request(ctx, port, method, path, data, limit) if local else None
    if reply is None:
        trouble = f"curl: (7) Failed to connect to {parts.hostname} port {port} after 0 ms: Could not connect to server\n"
        return said(_written(form, 0, ""), error="" if quiet else trouble, status=7)
    if reply.hangs:
        trouble = f"curl: (28) Operation timed out after {limit * 1000:.0f} milliseconds with 0 bytes received\n"
        return said(_written(form, 0, ""), error="" if quiet else trouble, status=28)
    written = _written(form, reply.status, reply.headers.get("content-type", ""))
    if fail and reply.status >= 400:
        return said(written, error=f"curl: (22) The requested URL returned error: {reply.status}\n", status=22)
    body = reply.body
    if output:
        if output != "/dev/null":
            write_file(ctx, output, body)
        body = b""
    return Answer(0, body + written.encode())


def _written(form: str, status: int, kind: str) -> str:
    """What ``-w FORM`` prints."""
    return form.replace("%{http_code}", f"{status:03d}").replace("%{content_type}", kind).replace("\\n", "\n")


def _ss(ctx: Context, argv: list[str]) -> Answer:
    """``ss -ltnpH``: who listens, one line a socket."""
    options = "".join(a[1:] for a in argv[1:] if a.startswith("-"))
    if not set("lt") <= set(options):
        ctx.note_unknown(" ".join(argv))
        return said(error="lab: this simulated machine only knows listening TCP sockets\n", status=255)
    out = "" if "H" in options else "State  Recv-Q Send-Q Local Address:Port Peer Address:Port Process\n"
    rows = [(22, "0.0.0.0", next((p for p in ctx.system.processes.values() if p.comm == "sshd"), None), 128)]
    rows += [(e.port, e.address, ctx.system.processes.get(e.pid), 2048) for e in ctx.system.endpoints.values()]
    for port, address, process, backlog in rows:
        if process is None:
            continue
        users = f'users:(("{process.comm}",pid={process.pid},fd={7 if port == 22 else 73}))' if "p" in options else ""
        out += f"LISTEN 0      {backlog:<6} {address}:{port:<8} 0.0.0.0:*    {users}".rstrip() + "\n"
    return said(out)


def _fincore(ctx: Context, argv: list[str]) -> Answer:
    """``fincore -b -n -o RES,SIZE,FILE``: how much of each file is in memory."""
    out, errors = "", ""
    for path in [w for w in argv[1:] if w.startswith("/")]:
        try:
            _, node = ctx.tree.lookup(path)
        except OSError as error:
            errors += f"fincore: failed to open: {path}: {error.strerror}\n"
            continue
        share = ctx.system.page_cache.get(posixpath.dirname(path), 0.0)
        out += f"{int(node.size * share) // 4096 * 4096} {node.size} {path}\n"
    return said(out, error=errors, status=1 if errors else 0)

"""How set-up behaves: what is current is passed over; what fails or is interrupted is taken up again."""

from __future__ import annotations

import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.prepare import dist, llama, node, plan, vllm
from tests.prepare.checks.wheels import wheels
from tests.prepare.environments import locked_names, package_counter
from tests.prepare.places import Places, find_places, is_made_here, require_disk
from tests.prepare.progress import QUIET_S, Progress, Step, StepFailed, carry_out, child_environment, digest, run

from .sources import ROOT

LOCKS = sorted(
    path
    for folder in ("edge_node/deploy", "cloud_pool/deploy", "models/train", "tests/bench/peers", "docs")
    for path in ROOT.glob(f"{folder}/requirements*.txt")
)


def quiet() -> Progress:
    return Progress(io.StringIO(), now=lambda: 0.0)


def step(stamp: Path, work: Callable[[], None], *, key: str = "k", there: bool = True) -> Step:
    def do(_progress: Progress) -> str:
        work()
        return "done"

    return Step(title="a step", stamp=stamp, key=key, there=lambda: there, work=do)


def places(tmp_path: Path) -> Places:
    return Places(root=ROOT, cache=tmp_path / "cache", python=Path(sys.executable))


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_step_is_done_once(tmp_path: Path) -> None:
    """A step whose stamp fits is passed over the second time."""
    calls: list[int] = []
    steps = [step(tmp_path / "stamp", lambda: calls.append(1))]
    assert [carry_out(steps, quiet()), carry_out(steps, quiet())] == [1, 0]
    assert calls == [1]


def test_a_changed_key_does_it_again(tmp_path: Path) -> None:
    """When what the result depends on changes, the work is done again."""
    calls: list[int] = []
    for key in ("a", "a", "b"):
        carry_out([step(tmp_path / "stamp", lambda: calls.append(1), key=key)], quiet())
    assert len(calls) == 2


def test_a_vanished_result_does_it_again(tmp_path: Path) -> None:
    """A stamp alone is no proof: when the result is gone, the work is done again."""
    calls: list[int] = []
    for there in (True, False):
        carry_out([step(tmp_path / "stamp", lambda: calls.append(1), there=there)], quiet())
    assert len(calls) == 2


@pytest.mark.parametrize("end", [StepFailed("no network"), KeyboardInterrupt(), SystemExit(143)])
def test_a_broken_step_leaves_no_stamp_and_is_resumed(tmp_path: Path, end: BaseException) -> None:
    """A step that fails, or is interrupted, leaves no stamp, even over an older one; the next run begins with it."""
    calls: list[str] = []

    def breaks() -> None:
        raise end

    first, second = tmp_path / "first", tmp_path / "second"
    second.write_text("an older key")
    steps = [step(first, lambda: calls.append("first")), step(second, breaks)]
    with pytest.raises(type(end)):
        carry_out(steps, quiet())
    assert first.exists()
    assert not second.exists()
    steps[1] = step(second, lambda: calls.append("second"))
    assert carry_out(steps, quiet()) == 1
    assert calls == ["first", "second"]


def test_output_goes_to_the_log_and_what_is_watched_is_shown(tmp_path: Path) -> None:
    """A program's lines land in its log, and what the watch makes of them on the progress line."""
    out = io.StringIO()
    clock = iter(float(number) * QUIET_S for number in range(100))
    progress = Progress(out, now=lambda: next(clock))
    progress.begin("[1/1]", "work")
    run(
        python("print('one'); print('two')"),
        log=tmp_path / "log",
        environ=os.environ,
        progress=progress,
        watch=str.strip,
    )
    assert (tmp_path / "log").read_text() == "one\ntwo\n"
    assert re.findall(r"\] (one|two) \(", out.getvalue()) == ["one", "two"]


def test_off_a_terminal_progress_is_sparing() -> None:
    """In a log file a line comes at most every ten seconds, not one for each compiled file."""
    out = io.StringIO()
    now = 0.0
    progress = Progress(out, now=lambda: now)
    progress.begin("[1/1]", "work")
    for second in range(25):
        now = float(second)
        progress.show(str(second))
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["work", "10", "20"]


def test_a_failing_program_says_what_and_where(tmp_path: Path) -> None:
    """The failure carries the program's status, its last lines, the log and the advice."""
    with pytest.raises(StepFailed) as caught:
        run(
            python("print('no space'); raise SystemExit(3)"),
            log=tmp_path / "log",
            environ=os.environ,
            advice="free some",
        )
    fault = caught.value
    assert "status 3" in fault.fault
    assert (fault.tail, fault.advice, fault.log) == ("no space", "free some", tmp_path / "log")


def test_a_missing_program_is_a_failed_step(tmp_path: Path) -> None:
    """A program that is not there is named, with the advice."""
    with pytest.raises(StepFailed, match="no-such-program"):
        run(["/no-such-program"], log=tmp_path / "log", environ={})


def test_an_interrupt_ends_the_whole_group(tmp_path: Path) -> None:
    """Leaving a running program by an exception ends it and what it started: no compiler is left behind."""
    # The program starts one of its own, tells its pid, and both would sleep for a minute.
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)"
    )
    ended: list[int] = []  # readable as soon as that process has ended

    def interrupt(line: str) -> None:
        ended.append(os.pidfd_open(int(line)))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(python(code), log=tmp_path / "log", environ=os.environ, watch=interrupt)
    try:
        assert select.select(ended, [], [], 30.0)[0] == ended
    finally:
        os.close(ended[0])


def test_the_program_answers_sigterm_with_143(tmp_path: Path) -> None:
    """SIGTERM in the middle of a step ends set-up with 143, the step's program too, and leaves no stamp."""
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from tests.prepare import __main__ as prepare\n"
        "from tests.prepare.progress import run\n"
        "from tests.prepare.progress import Step, carry_out\n"
        "from tests.prepare.progress import Progress\n"
        "signal.signal(signal.SIGTERM, prepare._terminated)\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "def work(progress):\n"
        "    run(['sleep', '60'], log=folder / 'log', environ=os.environ)\n"
        "    return ''\n"
        "print('at work', flush=True)\n"
        "step = Step('t', folder / 'stamp', 'k', lambda: True, work)\n"
        "carry_out([step], Progress(sys.stderr))\n"
    )
    with subprocess.Popen(
        python(code), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as program:
        assert program.stdout is not None
        program.stdout.readline()
        program.send_signal(signal.SIGTERM)
        assert program.wait(timeout=30) == 143
    assert not (tmp_path / "stamp").exists()


def test_pip_is_counted() -> None:
    """pip's lines become a count of packages; a package seen twice counts once; other lines are not shown."""
    watch = package_counter(3)
    shown = [
        watch(line)
        for line in ("Collecting aiohttp==3.1", "  Downloading x", "Collecting aiohttp==3.1", "Collecting yarl")
    ]
    assert shown == ["1/3 packages: aiohttp", None, "1/3 packages: aiohttp", "2/3 packages: yarl"]


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_locks_are_hashed_and_name_no_place(lock: Path) -> None:
    """Every locked package has an exact version and hashes, and nothing says where packages come from."""
    text = re.sub(r"(?m)^#.*\n", "", lock.read_text())
    entries = re.split(r"\n(?=\S)", text.strip())
    assert entries
    assert [entry.split()[0] for entry in entries if not re.match(r"[A-Za-z0-9_.-]+==\S+", entry)] == []
    assert [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry] == []
    assert re.findall(r"\S*(?:://|--(?:extra-)?index|--find-links)\S*", text) == []


@pytest.mark.parametrize("folder", ["edge_node/sdk-ts", "tests/clients"])
def test_locks_of_npm_are_hashed_and_name_no_place(folder: str) -> None:
    """Each package has an exact version and a hash, and npm is asked for it by name; all wishes are exact."""
    lock = json.loads((ROOT / folder / "package-lock.json").read_text())["packages"]
    wishes = json.loads((ROOT / folder / "package.json").read_text())
    wished = {**wishes.get("dependencies", {}), **wishes.get("devDependencies", {})}
    own = lock.pop("")
    assert {**own.get("dependencies", {}), **own.get("devDependencies", {})} == wished
    assert [name for name, version in wished.items() if lock[f"node_modules/{name}"]["version"] != version] == []
    assert [name for name, one in lock.items() if not one["integrity"].startswith("sha512-")] == []
    assert [name for name, one in lock.items() if "resolved" in one] == []


def test_node_is_new_enough_or_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for program, words in (("node", "echo v18.19.0"), ("npm", "true")):
        (tmp_path / program).write_text(f"#!/bin/sh\n{words}\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StepFailed, match=r"Node\.js 20 or newer is required, but .* is v18\.19\.0") as old:
        node.require_node()
    assert "CAUSEWAY_SKIP=node" in old.value.advice
    (tmp_path / "node").write_text("#!/bin/sh\necho v20.1.0\n")
    assert node.require_node() == str(tmp_path / "npm")
    (tmp_path / "npm").unlink()
    with pytest.raises(StepFailed, match=r"There is no npm\.") as missing:
        node.require_node()
    assert "apt-get install npm" in missing.value.advice


def test_an_unreachable_registry_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = places(tmp_path)
    (packages, *_) = node.node_steps(here, tmp_path)
    monkeypatch.setattr(node, "require_node", lambda: "false")
    with pytest.raises(StepFailed, match="false ended with status 1") as caught:
        packages.work(quiet())
    assert "Is the network up?" in caught.value.advice
    assert "CAUSEWAY_SKIP=node" in caught.value.advice


def test_the_locks_hold_what_the_project_asks_for() -> None:
    """Each dependency in pyproject.toml is in the lock that `make run` installs; torch is in none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wishes = {re.split(r"[<>=!~;\[ ]", wish)[0].lower() for wish in project["dependencies"]}
    assert wishes - set(locked_names(ROOT / "edge_node/deploy/requirements.txt")) == set()
    assert [lock.name for lock in LOCKS if "torch" in locked_names(lock)] == []


def test_triton_gets_the_numpy_that_its_server_needs() -> None:
    """Triton's lock pins numpy below 2: above, its Python backend answers with empty data."""
    text = (ROOT / "cloud_pool/deploy/requirements-triton.txt").read_text()
    (version,) = re.findall(r"^numpy==(\d+)\.", text, flags=re.MULTILINE)
    assert int(version) < 2


def test_the_cache_follows_the_environment(tmp_path: Path) -> None:
    """$CAUSEWAY_CACHE, then $XDG_CACHE_HOME, then ~/.cache hold what is compiled."""
    assert find_places({"CAUSEWAY_CACHE": str(tmp_path)}).cache == tmp_path
    assert find_places({"XDG_CACHE_HOME": str(tmp_path)}).cache == tmp_path / "causeway"
    assert find_places({}).cache == Path.home() / ".cache" / "causeway"


def test_what_would_lead_pip_astray_is_taken_out() -> None:
    """An activated environment or a user install does not redirect set-up; the user's index does stay."""
    environ = child_environment({"PYTHONPATH": "x", "PIP_USER": "1", "VIRTUAL_ENV": "y", "PIP_INDEX_URL": "z"})
    assert not {"PYTHONPATH", "PIP_USER", "VIRTUAL_ENV"} & set(environ)
    assert environ["PIP_INDEX_URL"] == "z"


def test_another_processor_or_flag_is_another_wheel(tmp_path: Path) -> None:
    """The compiled wheel is found again only for the same flags and processor."""
    here = places(tmp_path)
    assert llama.wheel_key(here, {}) == llama.wheel_key(here, {"HOME": "/x"})
    assert llama.wheel_key(here, {}) != llama.wheel_key(here, {"CMAKE_ARGS": "-DGGML_CUDA=on"})
    assert llama.wheel_key(here, {}) == llama.wheel_key(here, {"CUDA": "0"})
    assert llama.wheel_key(here, {"CUDA": "1"}) != llama.wheel_key(here, {"CUDA": "1", "CUDAARCHS": "87"})
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("processor: 0\nmodel name: A\nflags: sse avx\ncpu MHz: 1\n")
    new.write_text("processor: 0\nmodel name: A\nflags: sse avx avx512f\ncpu MHz: 1\n")
    assert llama.processor(old) != llama.processor(new)
    new.write_text("processor: 0\nmodel name: A\nflags: sse avx\ncpu MHz: 2\n\nprocessor: 1\nflags: sse avx\n")
    assert llama.processor(old) == llama.processor(new)


def test_compilers_fit_into_memory(tmp_path: Path) -> None:
    """A device short of memory compiles with fewer jobs than it has cores, but with one at least."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable:     300000 kB\n")
    assert llama.parallel_jobs(meminfo) == 1
    meminfo.write_text(f"MemAvailable: {999 * 1024**2} kB\n")
    assert llama.parallel_jobs(meminfo) >= 1


def test_skipping_leaves_steps_out(tmp_path: Path) -> None:
    """CAUSEWAY_SKIP leaves optional parts out; a name it does not know is refused with those that it does."""
    here = places(tmp_path)
    full = [each.title for each in plan.plan("test", here, {})]
    less = [each.title for each in plan.plan("test", here, {"CAUSEWAY_SKIP": "triton,redis,postgres"})]
    assert len(full) - len(less) == 3
    assert [title for title in less if "torch" in title]
    unseen = {each.title for each in plan.plan("test", here, {"CAUSEWAY_SKIP": "chromium,node"})}
    of_npm = {"packages of npm for typescript", "TypeScript SDK", "packages of npm for clients"}
    assert set(full) - unseen == {"chromium", "npm"} | of_npm
    untrained = [each.title for each in plan.plan("test", here, {"CAUSEWAY_SKIP": "torch"})]
    assert not [title for title in untrained if "torch" in title or "training" in title]
    with pytest.raises(StepFailed) as caught:
        plan.plan("test", here, {"CAUSEWAY_SKIP": "tritn"})
    assert "triton redis nats mosquitto postgres chromium node swtpm tpm2 prometheus torch" in caught.value.advice


def test_torch_is_set_up_for_those_who_train(tmp_path: Path) -> None:
    """`make test` trains in small; `make run`, `make check` and `make bench` do without torch."""
    here = places(tmp_path)
    for goal in ("run", "check", "bench"):
        assert not [each.title for each in plan.plan(goal, here, {}) if "torch" in each.title]
    for goal in ("test", "train"):
        (title,) = [each.title for each in plan.plan(goal, here, {}) if "torch" in each.title]
        assert title.startswith(plan.TORCH)
        (other,) = [each for each in plan.plan(goal, here, {"CAUSEWAY_TORCH": "torch==9"}) if "torch" in each.title]
        assert other.title.startswith("torch==9 ")


def test_training_installs_what_the_project_names() -> None:
    """The extra `torch` is torch, pinned by its version, and what its lock file pins with hashes."""
    with (ROOT / "models" / "train" / "pyproject.toml").open("rb") as file:
        wishes = [Requirement(wish) for wish in tomllib.load(file)["project"]["optional-dependencies"]["torch"]]
    locked = (ROOT / "models" / "train" / "requirements-train.txt").read_text(encoding="utf-8")
    pins = dict(re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)", locked, flags=re.MULTILINE))
    assert "torch" not in pins
    name, _, version = plan.TORCH.partition("==")
    pins[name] = version
    assert {wish.name for wish in wishes} == {"onnx", "tokenizers", "torch"}
    assert all(wish.specifier.contains(pins[wish.name]) for wish in wishes)


def test_a_moved_environment_is_not_taken_for_ours(tmp_path: Path) -> None:
    """An environment copied from elsewhere holds the other place's paths and is made again."""
    venv = tmp_path / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "activate").write_text("VIRTUAL_ENV=/elsewhere/.venv")
    assert not is_made_here(venv)
    (venv / "bin" / "activate").write_text(f"VIRTUAL_ENV={venv}")
    assert is_made_here(venv)


def test_too_little_disk_is_said_before_compiling(tmp_path: Path) -> None:
    """Both sizes are in the message, and how to put the cache elsewhere."""
    with pytest.raises(StepFailed, match="GB are needed") as caught:
        require_disk(tmp_path, 10**18)
    assert "CAUSEWAY_CACHE" in caught.value.advice


def test_parts_of_a_digest_do_not_run_together() -> None:
    """Where one part ends and the next begins is part of the hash."""
    assert digest("ab", "c") != digest("a", "bc")


def toolkit(folder: Path, *files: str) -> dict[str, str]:
    """A CUDA toolkit of version 12.6 with these files, and an environment that finds it."""
    nvcc = folder / "bin" / "nvcc"
    for name in ("bin/nvcc", *files):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    nvcc.write_text(f"#!/bin/sh\necho 'release 12.6, V12.6.85'\necho '#$ TOP={folder}/bin/..'\n")
    nvcc.chmod(0o755)
    return {"CUDA": "1", "CUDACXX": str(nvcc), "CUDAARCHS": "87"}


def test_a_whole_cuda_toolkit_is_used_as_it_is(tmp_path: Path) -> None:
    environ = toolkit(tmp_path / "cuda", "include/cublas_v2.h", "lib64/stubs/libcuda.so")
    flags = llama.cuda_flags(places(tmp_path), Path("no-python"), environ, quiet())
    assert "-DCMAKE_CUDA_ARCHITECTURES=87" in flags
    assert f"-DCMAKE_CUDA_COMPILER={tmp_path}/cuda/bin/nvcc" in flags
    assert not any("cublas" in flag or "VMM" in flag for flag in flags)


def test_cublas_from_packages_completes_a_bare_compiler(tmp_path: Path) -> None:
    here = places(tmp_path)
    folder = here.cache / "cublas-12.6" / "nvidia" / "cublas"
    for name in ("include/cublas_v2.h", "lib/libcublas.so.12", "lib/libcublasLt.so.12"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    flags = llama.cuda_flags(here, Path("no-python"), toolkit(tmp_path / "cuda"), quiet())
    assert f"-DCUDA_cublas_LIBRARY={folder}/lib/libcublas.so.12" in flags
    assert f"-DCUDA_cublasLt_LIBRARY={folder}/lib/libcublasLt.so.12" in flags
    assert f"-DCMAKE_CUDA_FLAGS=-I{folder}/include" in flags
    assert "-DGGML_CUDA_NO_VMM=ON" in flags


def test_a_build_for_cuda_says_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StepFailed, match="there is no nvcc"):
        llama.find_toolkit({"CUDACXX": str(tmp_path / "nvcc")})
    monkeypatch.setattr(llama, "GPU_FILES", (tmp_path / "none",))
    environ = toolkit(tmp_path / "cuda") | {"CUDAARCHS": ""}
    with pytest.raises(StepFailed, match="there is none") as caught:
        llama.cuda_flags(places(tmp_path), Path("no-python"), environ, quiet())
    assert "CUDAARCHS=87" in caught.value.advice


# --- vLLM, which is asked for --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "flags"), [("x86_64", "fpu sse4_2 avx2"), ("x86_64", ""), ("aarch64", "fpu avx512f")]
)
def test_a_processor_on_which_vllm_was_not_run_is_refused(tmp_path: Path, machine: str, flags: str) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"model name\t: a processor\nflags\t\t: {flags}\n")
    with pytest.raises(StepFailed, match="AVX-512"):
        vllm.require_vllm_host(machine, cpuinfo)
    cpuinfo.write_text("flags\t\t: fpu avx2 avx512f\n")
    vllm.require_vllm_host("x86_64", cpuinfo)


def test_vllm_is_installed_only_with_consent_to_both_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("no\n"))
    with pytest.raises(StepFailed, match="Nothing was installed") as raised:
        vllm.ask(places(tmp_path), {})
    assert "YES=1" in raised.value.advice
    printed = capsys.readouterr().out
    assert "3.4 GB" in printed
    assert "361 MB" in printed
    monkeypatch.setattr("sys.stdin", io.StringIO(""))  # as in CI
    with pytest.raises(StepFailed):
        vllm.ask(places(tmp_path), {})
    vllm.ask(places(tmp_path), {"YES": "1"})


def test_a_vllm_that_lost_a_part_is_installed_again(tmp_path: Path) -> None:
    (step,) = plan.plan("vllm", places(tmp_path), {})
    parts = [places(tmp_path).vllm / name for name in ("environment/bin/python", f"{vllm.MODEL}/model.safetensors")]
    for part in (*parts, vllm.vllm_description(places(tmp_path))):
        assert not step.there()
        part.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
    assert step.there()


def test_vllm_is_part_of_no_other_goal(tmp_path: Path) -> None:
    goals = ("run", "fleet", "test", "quick", "check", "bench", "train")
    titles = {goal: [one.title for one in plan.plan(goal, places(tmp_path), {})] for goal in goals}
    assert [goal for goal, steps in titles.items() if "vLLM" in steps] == []
    assert [one.title for one in plan.plan("vllm", places(tmp_path), {})] == ["vLLM"]


def test_llama_cpp_for_another_processor_is_compiled_by_its_compiler() -> None:
    """It has several CPU backends; a build for CUDA, whose GPU does the work, has the one of CMake's defaults."""
    flags = dist.cmake_flags("aarch64", "aarch64-linux-gnu-", {})
    assert {"-DCMAKE_SYSTEM_PROCESSOR=aarch64", "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++"} < set(flags)
    assert {"-DGGML_NATIVE=OFF", "-DCAUSEWAY_CPU_VARIANTS=armv8.0_1;armv8.2_2;armv8.6_2"} < set(flags)
    assert dist.cmake_flags("aarch64", "", {"CUDA": "1"}) == dist.cmake_flags("x86_64", "", {}) == ["-DGGML_NATIVE=OFF"]


def test_only_a_wheel_with_several_backends_changes_ggml() -> None:
    flags = {machine: " ".join(dist.cmake_flags(machine, "", {})) for machine in ("aarch64", "x86_64")}
    assert llama.project_include({"CMAKE_ARGS": flags["x86_64"]}) == llama.project_include({}) == llama.TRIM
    assert llama.project_include({"CMAKE_ARGS": flags["aarch64"]}) == llama.TRIM + llama.CHOICE


def test_a_processor_without_its_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StepFailed, match="for aarch64 needs its compiler") as raised:
        dist.ask(places(tmp_path), "aarch64")
    assert "apt-get install g++-aarch64-linux-gnu" in raised.value.advice


def test_a_wheel_is_for_the_oldest_c_library_with_all_its_symbols() -> None:
    """Versions are compared as numbers, and those of libstdc++ are not glibc's."""
    old, new = b"\x7fELF\0GLIBC_2.9\0GLIBC_2.17\0GLIBCXX_3.4.30\0", b"\x7fELF\0GLIBC_2.4\0GLIBC_2.34\0"
    assert dist.needed_glibc([old]) == 17
    assert dist.needed_glibc([old, b"text", new]) == 34


def test_the_wheel_of_the_processor_is_taken(tmp_path: Path) -> None:
    folder, home = tmp_path / "dist", replace(places(tmp_path), root=tmp_path)
    folder.mkdir()
    names = ("causeway_router-1-py3-none-any.whl", "causeway_sdk-1-py3-none-any.whl")
    for name in (*names, "llama_cpp_python-1-py3-none-manylinux_2_34_x86_64.whl"):
        (folder / name).touch()
    with pytest.raises(StepFailed, match="lacks a wheel for aarch64"):
        wheels(home, "aarch64")
    (folder / "llama_cpp_python-1-py3-none-manylinux_2_34_aarch64.whl").touch()
    for machine in ("aarch64", "x86_64"):
        assert wheels(home, machine)[2].endswith(f"_{machine}.whl")

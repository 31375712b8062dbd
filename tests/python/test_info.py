"""Devices as Python sees them, and the facts that `paceline.info` collects and shows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline import _info_search, _info_text, info
from paceline._core import runtime

# --- devices -----------------------------------------------------------------------------------------------------


def test_devices_lie_on_cores_of_their_own_inside_the_mask() -> None:
    found = paceline.devices()
    assert [device.name for device in found] == [f"host:{i}" for i in range(len(found))]
    cores = [core for device in found for core in device.cores]
    assert len(cores) == len(set(cores))
    assert set(cores) <= os.sched_getaffinity(0)
    for index, device in enumerate(found):
        assert (device.kind, device.index, device.memory_space) == ("host", index, "host")
        assert device.numa_node is None or device.numa_node >= 0


def test_devices_are_values() -> None:
    device = paceline.find_device("host:0")
    assert device == paceline.devices()[0]
    assert hash(device) == hash(paceline.find_device("host:0"))
    assert device != paceline.find_device("host:1")
    assert device != "host:0"
    assert str(device) == "host:0"
    assert repr(device).startswith("<paceline.Device host:0")
    with pytest.raises(AttributeError):
        device.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize("name", ["gpu:0", "cuda:4096", "cuda", "cuda:x", "host", "host:-1", ""])
def test_every_way_to_name_devices_says_which_there_are(name: str) -> None:
    names = ", ".join(device.name for device in paceline.devices())
    message = f"'{name}'.*; name some of the devices of this machine: {re.escape(names)}$"
    for call in (paceline.find_device, paceline.DeviceGroup, lambda name: paceline.DeviceGroup(["host:0", name])):
        with pytest.raises(paceline.InvalidArgument, match=message):
            call(name)


def test_devices_follow_the_affinity_mask_of_the_process() -> None:
    core = min(os.sched_getaffinity(0))
    program = f"import os; os.sched_setaffinity(0, [{core}]); import paceline; print(paceline.devices())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.count("Device") == 1
    assert f"host:0 core {core}" in done.stdout


# --- search results -----------------------------------------------------------------------------------------------


def test_collect_agrees_with_the_library_and_can_be_written_as_json() -> None:
    facts = info.collect()
    assert json.loads(json.dumps(facts)) == facts
    assert [device["name"] for device in facts["devices"]] == [device.name for device in paceline.devices()]
    assert facts["memory_spaces"] == {"host": [device.name for device in paceline.devices()]}
    assert set(facts["cpu"]["affinity"]) == os.sched_getaffinity(0)
    assert facts["cpu"]["reduction_kernels"] in {"baseline", "avx2", "avx512"}
    assert facts["backends"]["host"] == {
        "built": True,
        "detail": f"{sum(device.kind == 'host' for device in paceline.devices())} devices",
    }
    assert all(part.isdigit() for part in facts["version"].split("."))
    assert facts["python"]["executable"] == sys.executable
    for name in ("compiler", "flags", "fmt", "pybind11"):
        assert facts["build"][name]


@pytest.mark.parametrize(
    ("reasons", "backend", "missing"),
    [
        ({"host": ""}, {"built": False, "detail": "not built; host devices only"}, True),
        (
            {"host": "", "cuda": "no NVIDIA driver is loaded"},
            {"built": True, "detail": "no devices: no NVIDIA driver is loaded"},
            False,
        ),
    ],
    ids=["not built", "no driver"],
)
def test_why_there_is_no_gpu_is_said(
    reasons: dict[str, str], backend: dict[str, Any], missing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(info, "why_no_devices", lambda: reasons)
    facts = info.collect()
    assert facts["backends"]["cuda"] == backend
    assert ("cuda backend" in [entry["name"] for entry in facts["missing"]]) == missing
    assert backend["detail"] in info.render(facts)
    if missing:
        assert (facts["gpus"], facts["gpu_libraries"]) == ([], {})
        assert "GPUs" not in info.render(facts).splitlines()


def test_links_show_the_speed_of_the_way_that_is_used() -> None:
    link = {"kind": "PCIe peer", "bytes_per_second": 10e9, "push_bytes_per_second": 24e9}
    links = [
        {**link, "from": "cuda:0", "to": "cuda:1", "pushed": True},
        {**link, "from": "cuda:1", "to": "cuda:0", "pushed": False},
    ]
    rows = {label: line.split() for label, line in _info_text.link_rows(links)}
    assert rows["from cuda:0"] == ["-", "24.0"]
    assert rows["from cuda:1"] == ["10.0", "-"]
    assert rows["pushed, if pulled"] == ["cuda:0", "to", "cuda:1", "10.0"]
    links[0]["pushed"] = False
    assert "pushed, if pulled" not in dict(_info_text.link_rows(links))


def with_gpus(monkeypatch: pytest.MonkeyPatch, health: dict[str, Any]) -> None:
    """One GPU, as on a machine with a driver."""
    gpu = types.SimpleNamespace(
        name="cuda:0", kind="cuda", index=0, memory_space="cuda:0", cores=(0, 1), numa_node=0, device_class="GPU"
    )
    facts = {
        "device": "cuda:0",
        "model": "NVIDIA H100 80GB HBM3",
        "memory_bytes": 80 * 2**30,
        "peak_clock_mhz": 1980,
        "peers": [],
        "why_no_partitions": "",
    }
    monkeypatch.setattr(info, "devices", lambda: [gpu, *paceline.devices()])
    monkeypatch.setattr(info, "gpu_facts", lambda: [facts])
    monkeypatch.setattr(info, "device_health", lambda name: health)
    nccl = {"version": "2.28.9", "path": "/lib/libnccl.so.2", "source": "loaded"}
    monkeypatch.setattr(info, "nccl_info", lambda: nccl)
    monkeypatch.setattr(info, "why_no_devices", lambda: {"cuda": "", "host": ""})


HEALTH = {
    "clock_hz": 1.2e9,
    "max_clock_hz": 1.98e9,
    "clock_limits": ["the power cap"],
    "limited_seconds": {"the power cap": 6.1},
    "temperature_celsius": 83.0,
    "power_watts": 349.5,
    "other_processes": 1,
    "other_memory_bytes": 3 * 2**30,
}


def test_gpus_are_told_with_their_health(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, HEALTH)
    facts = info.collect()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["gpus"][0]["health"]["clock_hz"] == 1.2e9
    rows = {" ".join(line.split()) for line in info.render(facts).splitlines()}
    assert {
        "cuda:0 NVIDIA H100 80GB HBM3",
        "memory 80.0 GiB",
        "peak clock 1.98 GHz",
        "clock 1.20 GHz",
        "clock limits the power cap",
        "limited the power cap 6.1 s",
        "temperature 83 C",
        "other memory 3.0 GiB",
        "NCCL 2.28.9 (/lib/libnccl.so.2); source: loaded",
    } <= rows
    assert not any("partitions" in row for row in rows), "what is empty is left out"


def test_gpus_are_told_where_little_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    health = {"why_no_health": "NVML cannot be loaded"}
    with_gpus(monkeypatch, health)
    monkeypatch.setattr(info, "gpu_facts", lambda: [])
    monkeypatch.setattr(info, "nccl_info", lambda: {"version": "", "path": "", "why_none": "no libnccl.so.2"})
    facts = info.collect()
    assert facts["gpus"] == [{"device": "cuda:0", "health": health}]
    rows = {" ".join(line.split()) for line in info.render(facts).splitlines()}
    assert {"why no health NVML cannot be loaded", "NCCL none: no libnccl.so.2"} <= rows


def test_health_is_asked_by_name() -> None:
    health = runtime.device_health("host:0")
    assert {"clock_hz", "max_clock_hz", "cores", "quota"} >= set(health)
    with pytest.raises(paceline.InvalidArgument, match="host:x"):
        runtime.device_health("host:x")


def test_collect_imports_none_of_the_libraries_it_looks_for() -> None:
    program = (
        "import sys; from paceline import info; info.collect(); print({'torch', 'numpy', 'sklearn'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


def test_an_installed_package_is_reported_with_its_version_and_place() -> None:
    numpy = pytest.importorskip("numpy")
    entry = info.collect()["libraries"]["numpy"]
    assert entry == {
        "found": True,
        "version": metadata.version("numpy"),
        "path": str(Path(numpy.__file__).parent),
        "source": "loaded",
    }


def test_nccl_is_not_opened_beside_the_one_that_is_named() -> None:
    """In a process of its own, because the first NCCL that is found stays."""
    if "cuda" not in runtime.why_no_devices():
        pytest.skip("no CUDA backend")
    program = (
        "from paceline import info; facts = info.collect(); assert facts['gpu_libraries'];"
        "print(facts['libraries']['libnccl.so.2'], 'libnccl' in open('/proc/self/maps').read())"
    )
    environment = {**os.environ, "PACELINE_NCCL_LIBRARY": "/nowhere/libnccl.so.2"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    absent = {"found": False, "version": None, "path": None, "source": None}
    assert done.stdout.strip() == f"{absent} False"


def cannot_open(name: str) -> None:
    raise OSError(f"{name}: cannot open shared object file")


def test_what_is_missing_is_listed_with_why_and_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_info_search, "find_spec", lambda name: None)
    monkeypatch.setattr("ctypes.CDLL", cannot_open)
    monkeypatch.setattr(info, "find_nccl", lambda used: _info_search.find_nccl({}))
    facts = info.collect()
    assert not any(entry["found"] for entry in facts["libraries"].values())
    names = [entry["name"] for entry in facts["missing"]]
    assert names == [
        *([] if facts["backends"]["cuda"]["built"] else ["cuda backend"]),
        "torch",
        "numpy",
        "scikit-learn",
        "matplotlib",
        "rich",
        "NVIDIA driver (libcuda.so.1)",
        "NCCL (libnccl.so.2)",
        "NVML (libnvidia-ml.so.1)",
    ]
    text = info.render(facts)
    for entry in facts["missing"]:
        assert entry["why"] in text
        assert entry["how"] in text


def test_text_shows_limits_and_unknowns() -> None:
    facts = info.collect()
    facts["cpu"]["cgroup_limit"] = {"cores": 1.5, "source": "/sys/fs/cgroup/cpu.max"}
    facts["cpu"]["affinity"] = []
    facts["devices"][0]["cores"] = [5, 0, 1, 3]
    facts["missing"] = []
    text = info.render(facts)
    assert "1.5 cores (/sys/fs/cgroup/cpu.max)" in text
    assert "unknown (no affinity mask)" in text
    assert "pinned to cores 0-1,3,5" in text
    assert "Missing" not in text


# Where packages and shared libraries are found.


def test_a_folder_of_the_name_of_a_package_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_package_of_ours").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    package = _info_search.Wanted("a-package-of-ours", "", "", "", "a_package_of_ours")
    assert not _info_search.find_package(package)["found"]
    (tmp_path / "a_package_of_ours" / "__init__.py").write_text("raise RuntimeError('imported')")
    found = _info_search.find_package(package)
    assert found["path"] == str(tmp_path / "a_package_of_ours")
    assert (found["version"], found["source"]) == (None, "Python path")


def test_a_library_is_found_where_the_system_loads_it_from() -> None:
    found = _info_search.find_shared_library(_info_search.Wanted("libc.so.6", "", "", "C"))
    assert (found["found"], found["source"]) == (True, "system")
    assert Path(found["path"]).name.startswith("libc.so")
    assert not _info_search.find_shared_library(_info_search.Wanted("libours.so.1", "", "", "Ours"))["found"]


def test_nccl_is_the_copy_that_the_library_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} was opened, perhaps as a second copy of NCCL")

    monkeypatch.setattr("ctypes.CDLL", refuse)
    monkeypatch.setattr(_info_search, "installed_nccl", lambda: "/pip/libnccl.so.2")
    monkeypatch.setenv("PACELINE_NCCL_LIBRARY", "/mine/libnccl.so.2")
    for path, source in {
        "/mine/libnccl.so.2": "PACELINE_NCCL_LIBRARY",
        "/pip/libnccl.so.2": "pip",
        "/usr/lib/libnccl.so.2": "system",
    }.items():
        found = _info_search.find_nccl({"version": "2.30.7", "path": path, "why_none": ""})
        assert found == {"found": True, "version": "2.30.7", "path": path, "source": source}
    # The named file is used or fails, and the one of pip is not taken instead.
    assert not _info_search.find_nccl({"version": "", "path": "", "why_none": "cannot be loaded"})["found"]


def test_a_build_without_gpus_looks_for_the_file_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_info_search, "installed_nccl", lambda: "/pip/libnccl.so.2")
    found = _info_search.find_nccl(None)
    assert found == {"found": True, "version": None, "path": "/pip/libnccl.so.2", "source": "pip"}
    monkeypatch.setattr(_info_search, "installed_nccl", lambda: None)
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    assert not _info_search.find_nccl(None)["found"]

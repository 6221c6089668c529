"""ParallelLayout: who reads what, worked out by hand and against the libraries it is read off."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dataservice.errors import ConfigError
from trainer_client import ParallelLayout

SIZES = [
    {"dp": 2, "cp": 2, "tp": 2, "pp": 2},
    {"dp": 3, "cp": 1, "tp": 4, "pp": 1},
    {"dp": 4, "cp": 2, "tp": 1, "pp": 3},
]


def every_rank(**sizes: Any) -> list[ParallelLayout]:
    world = ParallelLayout(**sizes).world_size
    return [ParallelLayout(rank=rank, **sizes) for rank in range(world)]


@contextmanager
def fake_job(rank: int, world_size: int) -> Iterator[None]:
    """This process as one of many that do not exist: groups are made, nothing is exchanged."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


# ---- places and peers ---------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("order", ["tp-cp-dp-pp", "tp-cp-pp-dp", "cp-tp-pp-dp", "dp-tp-cp-pp"])
def test_every_place_is_taken_once(sizes: dict[str, int], order: str) -> None:
    layouts = every_rank(**sizes, order=order)
    names = ("dp", "cp", "tp", "pp")
    places = [tuple(layout.place(name) for name in names) for layout in layouts]
    assert sorted(places) == list(itertools.product(*(range(sizes[name]) for name in names)))
    for layout in layouts:
        assert layout.peers == tuple(
            other.rank for other in layouts if other.dp_rank == layout.dp_rank
        )
        assert layout.readers == layout.peers and layout.peers[layout.peer] == layout.rank
        for name in names:
            apart = [n for n in names if n != name]
            assert layout.along(name) == tuple(
                other.rank
                for other in sorted(layouts, key=lambda one: one.place(name))
                if all(other.place(n) == layout.place(n) for n in apart)
            )
        assert layout.is_first_stage == (layout.place("pp") == 0)
        assert layout.is_last_stage == (layout.place("pp") == sizes["pp"] - 1)


def test_peers_of_a_host_are_those_of_its_ranks() -> None:
    layouts = every_rank(dp=2, tp=2, pp=2, ranks_per_host=4)
    assert [layout.host_peers for layout in layouts[:4]] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert layouts[5].peers == (0, 1, 4, 5) and layouts[5].host_peers == (4, 5)
    assert ParallelLayout(rank=5, dp=2, tp=2, pp=2).host_peers == (5,)


def test_where_the_trainer_hands_on_only_some_read() -> None:
    layouts = every_rank(dp=2, cp=2, tp=2, pp=3, trainer_shares=("tp", "pp"))
    reading = [layout for layout in layouts if layout.reads]
    assert all(layout.place("tp") == 0 and layout.place("pp") in (0, 2) for layout in reading)
    assert len(reading) == 2 * 2 * 2
    for layout in reading:
        assert len(layout.readers) == 4 and layout.readers[layout.peer] == layout.rank
    others = [layout for layout in layouts if not layout.reads]
    with pytest.raises(ConfigError, match=r"rank 1 is not to read.* tp, pp; .*trainer_shares"):
        _ = others[0].peer
    assert {layout.readers for layout in others} == {layout.readers for layout in reading}


# ---- alignment and sync domain ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cp", "tp", "sequence_parallel", "expected"),
    [
        (1, 1, False, 1),
        (1, 8, False, 1),
        (1, 8, True, 8),
        (2, 8, False, 4),
        (2, 8, True, 16),
        (4, 1, True, 8),
        (4, 3, True, 24),
        (2, 2, True, 4),
    ],
)
def test_alignment(cp: int, tp: int, sequence_parallel: bool, expected: int) -> None:
    layout = ParallelLayout(cp=cp, tp=tp, sequence_parallel=sequence_parallel)
    assert layout.alignment == expected
    if cp > 1:
        shares = tp if sequence_parallel else 1
        assert layout.alignment == math.lcm(2 * cp, cp * shares)


@pytest.mark.parametrize(
    ("sizes", "ep"),
    [
        *(({"dp": 8}, ep) for ep in (1, 2, 4, 8)),
        *(({"dp": 8, "cp": 2}, ep) for ep in (1, 2, 4, 8, 16)),
        *(({"dp": 6, "cp": 2, "tp": 2}, ep) for ep in (2, 3, 4, 6)),
    ],
)
@pytest.mark.parametrize("order", ["tp-cp-dp-pp", "tp-dp-cp-pp"])
def test_the_sync_domain_is_what_expert_groups_connect(
    sizes: dict[str, int], ep: int, order: str
) -> None:
    dp, cp = sizes["dp"], sizes.get("cp", 1)
    domain = ParallelLayout(**sizes, ep=ep, order=order).sync_domain
    # the experts' groups: ep neighbours each in the plane of cp and dp
    dp_rank = (lambda i: i // cp) if order.index("cp") < order.index("dp") else (lambda i: i % dp)
    group_of = list(range(dp))
    for first in range(0, dp * cp, ep):
        members = {group_of[dp_rank(i)] for i in range(first, first + ep)}
        group_of = [min(members) if group in members else group for group in group_of]
    assert dp % domain == 0
    assert all(len({group_of[i + j] for j in range(domain)}) == 1 for i in range(0, dp, domain))
    assert len(set(group_of)) == dp // domain


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dp": 0}, "dp is 0"),
        ({"dp": 2, "rank": 2}, r"rank is 2, must be in 0\.\.1"),
        ({"order": "tp-cp-dp"}, "name dp, cp, tp and pp once each"),
        ({"dp": 4, "ep": 3}, r"ep is 3: must divide dp \* cp \* tp = 4"),
        ({"dp": 4, "ranks_per_host": 3}, "ranks_per_host is 3: must divide the 4 ranks"),
        ({"trainer_shares": ("dp",)}, 'trainer_shares has "dp"'),
    ],
)
def test_a_layout_that_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ParallelLayout(**changes)


def test_expert_parallelism_may_take_ranks_of_tensor_parallelism() -> None:
    layout = ParallelLayout(dp=2, tp=4, pp=2, ep=8)
    assert layout.sync_domain == 2


# ---- torchrun -----------------------------------------------------------------------------------


def test_torchrun_says_where_a_process_stands() -> None:
    environ = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
    layout = ParallelLayout.from_env(environ, tp=2, cp=2, sequence_parallel=True)
    assert layout == ParallelLayout(
        rank=9, dp=4, cp=2, tp=2, ranks_per_host=8, sequence_parallel=True
    )
    assert layout.dp_rank == 2 and layout.host_peers == (8, 9, 10, 11)
    uneven = ParallelLayout.from_env(environ | {"LOCAL_WORLD_SIZE": "5"})
    assert uneven.dp == 16 and uneven.ranks_per_host == 0


def test_an_environment_without_torchrun_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"RANK is '' in the environment: start .* torchrun"):
        ParallelLayout.from_env({})
    with pytest.raises(ConfigError, match=r"WORLD_SIZE is 6: must be a multiple of .* = 4"):
        ParallelLayout.from_env({"RANK": "0", "WORLD_SIZE": "6"}, tp=4)


# ---- meshes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 5, 11])
def test_a_mesh_gives_its_places(rank: int) -> None:
    names, shape = ("pp", "dp_replicate", "dp_shard", "tp"), (1, 2, 3, 2)
    with fake_job(rank, 12):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        layout = ParallelLayout.from_mesh(mesh, ep=6)
        replicate, shard = mesh.get_local_rank("dp_replicate"), mesh.get_local_rank("dp_shard")
        assert layout.place("tp") == mesh.get_local_rank("tp")
    assert (layout.rank, layout.dp, layout.tp, layout.ep) == (rank, 6, 2, 6)
    assert layout.dp_rank == replicate * 3 + shard


def test_a_mesh_in_another_order() -> None:
    with fake_job(5, 8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "pp"))
        layout = ParallelLayout.from_mesh(mesh)
        for name in ("dp", "cp", "pp"):
            assert layout.place(name) == mesh.get_local_rank(name)


def test_meshes_that_do_not_say_enough_are_refused() -> None:
    with fake_job(0, 4):
        with pytest.raises(ConfigError, match="no mesh_dim_names"):
            ParallelLayout.from_mesh(init_device_mesh("cpu", (4,)))
        with pytest.raises(ConfigError, match=r"dimensions .'rows',.*: name them pp, dp"):
            ParallelLayout.from_mesh(init_device_mesh("cpu", (4,), mesh_dim_names=("rows",)))
        apart = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp_shard", "tp", "dp_in_ep"))
        with pytest.raises(ConfigError, match="beside each other"):
            ParallelLayout.from_mesh(apart)
        turned = DeviceMesh("cpu", [3, 2, 1, 0], mesh_dim_names=("dp",))
        with pytest.raises(ConfigError, match=r"the mesh has ranks \[3, 2, 1, 0\]: give one over"):
            ParallelLayout.from_mesh(turned)


# ---- Megatron -----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"])
@pytest.mark.parametrize("rank", [0, 3, 14])
def test_megatron_gives_its_groups(order: str, rank: int) -> None:
    state = pytest.importorskip("megatron.core.parallel_state", reason="megatron-core is missing")
    with fake_job(rank, 16):
        with pytest.raises(ConfigError, match="call initialize_model_parallel before"):
            ParallelLayout.from_megatron()
        state.initialize_model_parallel(
            tensor_model_parallel_size=2,
            pipeline_model_parallel_size=2,
            context_parallel_size=2,
            expert_model_parallel_size=2,
            order=order,
            create_gloo_process_groups=False,
        )
        try:
            layout = ParallelLayout.from_megatron(sequence_parallel=True)
            assert layout.dp_rank == state.get_data_parallel_rank()
            assert layout.dp_size == state.get_data_parallel_world_size()
            assert layout.place("cp") == state.get_context_parallel_rank()
            assert layout.place("tp") == state.get_tensor_model_parallel_rank()
            assert layout.is_first_stage == state.is_pipeline_first_stage()
            assert layout.is_last_stage == state.is_pipeline_last_stage()
            assert layout.ep == 2 and layout.alignment == 4
            assert layout.order == order.replace("-ep", "")
            assert layout.reads == (state.get_tensor_model_parallel_rank() == 0)
        finally:
            state.destroy_model_parallel()

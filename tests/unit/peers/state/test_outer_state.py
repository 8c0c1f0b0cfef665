import json
import math

import pytest
import torch

from peers.errors import ProtocolError, UserError
from peers.protocol.wire import encode
from peers.reduce.arithmetic import norm_of_pseudo_gradient
from peers.reduce.residuals import Residuals
from peers.state import files as state_files
from peers.state import outer_state
from peers.state.header import STATE_CHUNK_NUMEL, chunks_of
from peers.state.outer_optimizer import OuterOptimizer, rebase
from peers.state.outer_state import OuterState
from tests.support import certified
from tests.support.certified import begun
from tests.support.full_disk import full_disk

SIZES = (STATE_CHUNK_NUMEL + 300_001, 0, 5)


def some_state(seed=0, sizes=SIZES):
    generator = torch.Generator().manual_seed(seed)
    return begun([torch.randn(size, generator=generator) for size in sizes])


def average(state, fragment=0, seed=1):
    return torch.randn(state.sizes[fragment], generator=torch.Generator().manual_seed(seed))


def commit(state, fragment=0, seed=1, tokens=100, data_width=3):
    return certified.commit(
        state, average(state, fragment, seed), fragment=fragment, tokens=tokens, data_width=data_width
    )


def test_the_initial_state_depends_on_the_weights_alone():
    assert some_state().anchor_digest == some_state().anchor_digest
    assert some_state().anchor_digest != some_state(seed=1).anchor_digest
    state = OuterState.initial([torch.ones(3)])
    assert (state.head, state.epoch, state.header.committed_tokens) == ("", 0, 0)
    assert all(not momentum.any() for momentum in state.momentum)


def test_the_initial_momentum_has_the_digests_of_its_zeros_without_being_read(monkeypatch):
    hashed, original = [], outer_state.hash_chunk

    def hash_chunk(values):
        hashed.append(values.numel())
        return original(values)

    sizes = (3 * STATE_CHUNK_NUMEL, 0, STATE_CHUNK_NUMEL + 5)
    with monkeypatch.context() as patched:
        patched.setattr("peers.state.outer_state.hash_chunk", hash_chunk)
        state = OuterState.initial([torch.ones(size) for size in sizes])
    assert sorted(hashed) == sorted([STATE_CHUNK_NUMEL] * 4 + [5] + [STATE_CHUNK_NUMEL, 5])
    assert state.is_intact()
    assert [momentum.numel() for momentum in state.momentum] == list(sizes)


def test_a_commit_that_was_previewed_hashes_nothing_and_arrives_at_the_same():
    plain, state = some_state(), some_state()
    certificate = commit(state)
    OuterOptimizer(lr=0.7, momentum=0.9).commit(plain, 0, average(plain), certificate=certificate)
    assert state.header == plain.header
    assert state.is_intact() and plain.is_intact()


def test_a_commit_can_leave_the_new_anchor_in_place_of_the_average():
    plain, state = some_state(), some_state()
    commit(plain)
    average_of_all = average(state)
    certified.commit(state, average_of_all, tokens=100, into=average_of_all)
    assert state.header == plain.header
    assert torch.equal(average_of_all, state.anchor[0])


def test_a_commit_moves_everything_together():
    state = some_state()
    commit(state, tokens=99, data_width=3)
    assert (state.epoch, state.header.committed_tokens) == (1, 99)
    certificate = commit(state, tokens=51, data_width=2)
    assert (state.epoch, state.header.committed_tokens) == (2, 150)
    assert state.head == certificate.head
    assert state.anchor_digest == certificate.body.anchor and state.is_intact()


@pytest.mark.parametrize("other", ["anchor", "momentum"])
def test_a_certificate_of_another_anchor_or_of_another_momentum_alone_certifies_nothing(other):
    state = begun([torch.ones(3)])
    digests = {"anchor": state.anchor_digest, "momentum": state.header.momentum_digest}
    state.certify(certified.certificate_after(state, **digests))
    with pytest.raises(ProtocolError, match="not the one of the commit"):
        state.certify(certified.certificate_after(state, **digests | {other: "a" * 64}))


def test_two_peers_that_commit_the_same_have_one_head_and_others_do_not():
    states = [some_state() for _ in range(4)]
    commit(states[0])
    commit(states[1])
    commit(states[2], seed=2)
    commit(states[3], tokens=102)
    assert len({state.head for state in states}) == 3
    assert states[0].head == states[1].head


def test_a_commit_that_leads_elsewhere_than_its_certificate_says_leaves_nothing_to_serve():
    state, other = some_state(), some_state()
    certificate = commit(other, seed=2)
    with pytest.raises(ProtocolError, match="not the one of the commit"):
        OuterOptimizer(lr=0.7, momentum=0.9).commit(state, 0, average(state), certificate=certificate)
    assert state.epoch == 0 and state.snapshot() is None


def test_a_snapshot_does_not_change_when_the_state_does():
    state = some_state()
    with state.snapshot() as snapshot:
        head, anchor, momentum = (
            snapshot.header.head,
            snapshot.anchor[0].clone(),
            snapshot.momentum[0].clone(),
        )
        commit(state)
        commit(state)
        assert snapshot.header.head == head != state.head
        assert torch.equal(snapshot.anchor[0], anchor)
        assert torch.equal(snapshot.momentum[0], momentum)
        assert not torch.equal(state.anchor[0], anchor)
    in_place = state.anchor[0].data_ptr()
    commit(state)
    assert state.anchor[0].data_ptr() == in_place


def test_a_commit_that_breaks_off_leaves_nothing_to_serve_or_save(tmp_path):
    state = some_state()
    with pytest.raises(ValueError, match="an average of 3 values"):
        OuterOptimizer(lr=0.7, momentum=0.9).commit(state, 0, torch.zeros(3))
    assert state.epoch == 0
    assert state.snapshot() is None
    with pytest.raises(OSError, match="being changed"):
        state_files.save(state, tmp_path)


def test_the_norm_of_a_pseudo_gradient_is_that_of_the_difference():
    anchor, local = torch.randn(600_001), torch.randn(600_001)
    expected = float((anchor.double() - local.double()).norm())
    assert norm_of_pseudo_gradient(anchor, local) == pytest.approx(expected, rel=1e-5)
    assert norm_of_pseudo_gradient(torch.empty(0), torch.empty(0)) == 0.0
    local[5] = math.nan
    assert not math.isfinite(norm_of_pseudo_gradient(anchor, local))


def test_rebasing_carries_the_local_work_over_also_in_place():
    new, local, base = (torch.randn(600_001) for _ in range(3))
    expected = new + (local - base)
    out = torch.empty_like(new)
    rebase(new, local, base, out)
    assert torch.equal(out, expected)
    rebase(new, local, base, local)
    assert torch.equal(local, expected)


# On disk


def test_a_saved_state_comes_back_bit_for_bit_and_goes_on_alike(tmp_path):
    state = some_state()
    commit(state)
    (tmp_path / "step").mkdir()
    state_files.save(state, tmp_path / "step")
    state_files.save(state, tmp_path / "step")
    loaded = state_files.load(tmp_path / "step")
    assert loaded.header == state.header
    assert loaded.head == state.head
    assert all(
        torch.equal(a, b)
        for a, b in zip((*loaded.anchor, *loaded.momentum), (*state.anchor, *state.momentum), strict=True)
    )
    commit(state, seed=3)
    commit(loaded, seed=3)
    assert loaded.head == state.head
    assert state_files.load(tmp_path / "step").epoch == 1
    assert sorted(path.name for path in (tmp_path / "step").iterdir()) == ["outer.json", "outer.safetensors"]


def test_where_the_disk_is_full_it_says_so_and_the_state_saved_before_stays(tmp_path):
    state = some_state()
    state_files.save(state, tmp_path)
    before = state.head
    commit(state)
    with full_disk(), pytest.raises(OSError, match=r"outer\.safetensors"):
        state_files.save(state, tmp_path)
    assert state_files.load(tmp_path).head == before


def test_what_lossy_codecs_have_kept_back_is_saved_with_its_state(tmp_path):
    state = some_state(sizes=(4, 3))
    kept = [
        Residuals.from_tensors(4, {"contribution": torch.ones(4)}),
        Residuals.from_tensors(3, {"result": torch.full((2,), 0.5), "result_start": torch.tensor([1])}),
    ]
    state_files.save(state, tmp_path, kept)
    loaded = state_files.load_residuals(tmp_path, state_files.load(tmp_path))
    with loaded[0].held() as first, loaded[1].held() as second:
        assert {name: values.tolist() for name, values in first.items()} == {"contribution": [1.0] * 4}
        assert second["result"].tolist() == [0.5, 0.5] and second["result_start"].tolist() == [1]
    with pytest.raises(UserError, match="belongs to another state"):
        state_files.load_residuals(tmp_path, some_state(seed=5, sizes=(4, 3)))
    assert state_files.load_residuals(tmp_path / "elsewhere", state)[0].contribution_residual is None


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def give_it_anothers_certificate(path):
    other = some_state(seed=7).header.certificate
    text = {**json.loads(path.read_text()), "certificate": encode(other).hex()}
    path.write_text(json.dumps(text))


@pytest.mark.parametrize("name", ["outer.safetensors", "outer.json"])
@pytest.mark.parametrize(
    "damage", [flip_a_byte, cut, lambda path: path.unlink(), give_it_anothers_certificate]
)
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path, name, damage):
    if damage is give_it_anothers_certificate and name != "outer.json":
        damage = flip_a_byte
    state_files.save(some_state(), tmp_path)
    if damage is flip_a_byte and name == "outer.json":
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text.replace('"anchor_chunks": "', '"anchor_chunks": "00'))
    else:
        damage(tmp_path / name)
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        state_files.load(tmp_path)


def test_tensors_of_another_save_are_found_out(tmp_path):
    first, second = some_state(), some_state(seed=9)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    state_files.save(first, tmp_path / "a")
    state_files.save(second, tmp_path / "b")
    (tmp_path / "b" / "outer.safetensors").replace(tmp_path / "a" / "outer.safetensors")
    with pytest.raises(UserError, match="torn or damaged"):
        state_files.load(tmp_path / "a")


# Headers


def test_a_header_is_written_in_a_known_form_and_read_back_as_are_those_of_versions_before(tmp_path):
    header = some_state(sizes=(4, 2)).header
    saved = {
        "sizes": [4, 2],
        "anchor_chunks": header.anchor_chunks.hex(),
        "momentum_chunks": header.momentum_chunks.hex(),
        "certificate": encode(header.certificate).hex(),
        "is_workers_base": True,
        "head": header.head,
        "epoch": header.epoch,
        "anchor_digest": header.anchor_digest,
        "momentum_digest": header.momentum_digest,
    }
    path = tmp_path / "outer.json"
    path.write_text(json.dumps(saved, indent=1))
    assert state_files._header_bytes(header) == path.read_bytes()
    assert state_files._load_header(path) == header
    # Before it was known whether a late worker's weights belong to the state, they were taken to.
    del saved["is_workers_base"]
    path.write_text(json.dumps(saved))
    assert state_files._load_header(path) == header and state_files.is_workers_base(tmp_path)
    # A header from before certificates, with the fields that it had instead.
    del saved["certificate"]
    path.write_text(json.dumps({**saved, "lineage": "ab", "committed_tokens": 5}))
    loaded = state_files._load_header(path)
    assert loaded.certificate is None and loaded.anchor_digest == header.anchor_digest


@pytest.mark.parametrize(
    "change",
    [
        {"certificate": "78"},
        {"certificate": "x"},
        {"certificate": 5},
        {"certificate": None},
        {"anchor_chunks": ""},
        {"anchor_chunks": 64},
        {"anchor_chunks": "xy" * 64},
        {"momentum_chunks": "00" * 32},
        {"sizes": [5]},
        {"sizes": [4, -2]},
        {"sizes": [4, True]},
        {"sizes": [4, 2.5]},
        {"sizes": [4, 1 << 63]},
        {"sizes": None},
        *("sizes", "anchor_chunks", "momentum_chunks"),
    ],
)
def test_a_header_that_cannot_be_or_lacks_something_is_refused(tmp_path, change):
    path = tmp_path / "outer.json"
    saved = json.loads(state_files._header_bytes(some_state(sizes=(4, 2)).header))
    if isinstance(change, str):
        del saved[change]
    else:
        saved |= change
    path.write_text(json.dumps(saved))
    with pytest.raises(UserError, match="not the header of a checkpoint"):
        state_files._load_header(path)


def test_chunks_cover_every_fragment_without_gaps():
    chunks = list(chunks_of(SIZES))
    assert [chunk.position for chunk in chunks] == list(range(len(chunks)))
    for fragment, size in enumerate(SIZES):
        assert sum(chunk.numel for chunk in chunks if chunk.fragment == fragment) == size

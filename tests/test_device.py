"""Which device a rank takes: the CPU, unless CUDA is asked for."""

import pytest
import torch

import rowmesh as rm
from rowmesh.comm.device import choose_device
from rowmesh.train import doctor


@pytest.fixture
def with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "3")


@pytest.mark.usefixtures("with_cuda")
def test_the_cpu_is_taken_unless_cuda_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROWMESH_DEVICE", raising=False)
    assert rm.init_mesh().device == torch.device("cpu")
    monkeypatch.setenv("ROWMESH_DEVICE", "cuda")
    assert choose_device("cpu") == torch.device("cpu"), "the argument counts more"


@pytest.mark.usefixtures("with_cuda")
def test_cuda_that_is_asked_for_is_this_ranks_and_said_to_be_untried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.warns(UserWarning, match="has not been run by its authors"):
        assert choose_device("cuda") == torch.device("cuda", 3)
    with pytest.warns(UserWarning, match="rm.verify"):
        assert choose_device(torch.device("cuda", 1)) == torch.device("cuda", 1)
    monkeypatch.setenv("ROWMESH_DEVICE", "cuda")
    with pytest.warns(UserWarning, match="CUDA"):
        assert choose_device(None) == torch.device("cuda", 3)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ("gpu", "device 'gpu': rowmesh runs on 'cpu', or on 'cuda' if asked to"),
        ("meta", "device 'meta': rowmesh runs on"),
        ("cuda", "device 'cuda': torch finds no CUDA device here; say 'cpu'"),
    ],
)
def test_a_device_that_cannot_be_had_is_one_sentence(
    asked: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(rm.InputError, match=sentence):
        rm.init_mesh(device=asked)


def test_doctor_says_that_a_cuda_device_is_not_used_unless_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "A100")
    found = {finding.name: finding for finding in doctor.check_backends()}
    assert found["CUDA devices"].value == "2: A100"
    assert "not used unless asked" in found["CUDA devices"].advice
    names = [feature.name for feature in doctor.features(list(found.values()))]
    assert any("no GPU has run rowmesh yet" in name for name in names)

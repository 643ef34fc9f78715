"""Torch settings of the whole process: as they were after every call, whatever threads and interrupts do."""

import gc
import sys
import threading
from dis import opname
from functools import partial
from types import FrameType

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import linnet
from linnet._common import arithmetic, dual_level, forward_mode, network_settings, noting_saved_tensors, torch_settings
from linnet._common.torch_settings import Switch

CPU = torch.device("cpu")
SWITCHES = [
    torch_settings.PRECISION,
    torch_settings.ATTENTION,
    torch_settings.FASTPATH,
    torch_settings.MKLDNN,
    torch_settings.CUDNN,
]


def flags() -> dict[str, object]:
    places = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)
    cuda = torch.backends.cuda
    return {
        "fastpath": torch.backends.mha.get_fastpath_enabled(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "cudnn": torch.backends.cudnn.enabled,
        "tf32": [place.fp32_precision for place in places],
        "attention": [
            cuda.math_sdp_enabled(),
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        ],
        "hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "level": forward_ad._current_level,
    }


class Recurrent(nn.Module):
    """A network that needs every setting."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(3, 4, batch_first=True)
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.rnn(x)[0]
        return self.head(self.attend(h, h, h, need_weights=False)[0].mean(1))


MODEL = Recurrent()
SETTINGS = {
    "network": lambda: network_settings(MODEL, "highest", CPU),
    "network on a GPU": lambda: network_settings(MODEL, "highest", torch.device("cuda")),
    "forward mode": lambda: forward_mode(MODEL),
    "IEEE": lambda: torch_settings.tf32(False),
    "tf32": lambda: torch_settings.tf32(True),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_two_threads_that_overlap_leave_the_settings_as_they_were(name):
    """Each enters before the other leaves, and the first to enter is the first to leave."""
    before = flags()
    inside: list[dict[str, object]] = []
    one, two = threading.Event(), threading.Event()

    def other() -> None:
        with SETTINGS[name]():
            one.set()
            two.wait(10)
            inside.append(flags())

    thread = threading.Thread(target=other)
    with SETTINGS[name]():
        wanted = flags()
        thread.start()
        assert one.wait(10)
    two.set()
    thread.join()
    assert wanted != before
    assert inside == [wanted]
    assert flags() == before


def test_threads_that_want_different_values_both_get_the_exact_one():
    state = ["before"]
    switch = Switch(lambda: state[0], lambda value: state.__setitem__(0, value), exact="exact")
    one, two = threading.Event(), threading.Event()

    def other() -> None:
        with switch.at("exact"):
            one.set()
            two.wait(10)

    thread = threading.Thread(target=other)
    with switch.at("fast"):
        assert state == ["fast"]
        thread.start()
        assert one.wait(10)
        assert state == ["exact"]
        two.set()
        thread.join()
        assert state == ["fast"]
        with switch.at("exact"):  # in one thread the innermost block counts
            with switch.at("fast"):
                assert state == ["fast"]
            assert state == ["exact"]
    assert state == ["before"]


def test_a_setting_that_changed_between_two_blocks_is_the_one_that_is_put_back():
    state = ["first"]
    switch = Switch(lambda: state[0], lambda value: state.__setitem__(0, value), exact="exact")
    for before in ("first", "second", "third"):
        state[0] = before
        with switch.at("exact"):
            assert state == ["exact"]
        assert state == [before]


def test_threads_at_work_leave_the_settings_as_they_were():
    before = flags()
    x = torch.randn(4, 5, 3)
    each = [linnet.linearize(Recurrent().float()).jacobian(x, 2, progress=False) for _ in range(3)]
    U = torch.randn(each[0].shape[0], 3)
    expected, found = [J.T @ U for J in each], []

    def work(i: int) -> None:
        for _ in range(2):
            found.append((i, each[i].T @ U))

    in_threads([partial(work, i) for i in range(3)])
    assert len(found) == 6
    for i, product in found:
        torch.testing.assert_close(product, expected[i])
    assert flags() == before


def in_threads(works) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_wait_for_each_other_in_forward_mode():
    x, v = torch.randn(2, 5)
    found = []

    def work() -> None:
        for _ in range(20):
            with dual_level():
                found.append(forward_ad.unpack_dual(forward_ad.make_dual(x, v).sin()).tangent)

    in_threads([work] * 3)
    assert len(found) == 60
    for tangent in found:
        torch.testing.assert_close(tangent, v * x.cos())


class Interrupt:
    """Raises KeyboardInterrupt at the k-th place in the files named where Python looks for signals.

    Python does so when a function starts, after a call, and where a loop goes back.
    """

    def __init__(self, k: int, files: tuple[str, ...]) -> None:
        self.left, self.files = k, files
        self.before: dict[FrameType, str] = {}

    def __call__(self, frame: FrameType, event: str, arg: object) -> "Interrupt | None":
        if not frame.f_code.co_filename.endswith(self.files):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            before, self.before[frame] = self.before.get(frame, ""), opname[frame.f_code.co_code[frame.f_lasti]]
        if event == "call" or (event == "opcode" and before.startswith(("CALL", "JUMP_BACKWARD", "RESUME"))):
            self.left -= 1
            if self.left == 0:
                self.before.clear()
                raise KeyboardInterrupt
        return self

    def run(self, action) -> bool:
        """Whether the action was interrupted."""
        sys.settrace(self)
        try:
            action()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
            self.before.clear()
        return False


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", [*SETTINGS, "saved tensors", "arithmetic", "forward mode of autograd"])
def test_an_interrupt_at_any_step_leaves_the_settings_as_they_were(name):
    more = {
        "saved tensors": lambda: noting_saved_tensors(lambda t: t),
        "arithmetic": lambda: arithmetic("highest", torch.device("cuda")),
        "forward mode of autograd": dual_level,
    }
    make = (SETTINGS | more)[name]
    assert torch_settings._recurrent(MODEL)
    before, interrupted = flags(), 0

    def action() -> None:
        with make():
            pass

    files = ("torch_settings.py", "contextlib.py", "graph.py", "mha/__init__.py", "mkldnn/__init__.py", "forward_ad.py")
    while Interrupt(interrupted + 1, files).run(action):
        interrupted += 1
        assert flags() == before, f"step {interrupted}"
        assert not [switch for switch in SWITCHES if switch._lock._is_owned()]
        with forward_ad.dual_level():  # no level was left behind
            pass
    assert interrupted > 20


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_of_a_pass_leaves_the_settings_as_they_were():
    before = flags()
    x = torch.randn(4, 5, 3)
    lin = linnet.linearize(Recurrent().float())
    v = torch.randn(lin.p)

    def action() -> None:
        J = lin.jacobian(x, 2, progress=False)
        J @ v

    action()
    files = tuple(
        f"linnet/{name}.py"
        for name in (
            "_common/torch_settings",
            "network/functional_model",
            "jacobian/chunk",
            "jacobian/blocks/autodiff",
            "jacobian/passes",
        )
    )
    step, interrupted = 1, 0
    while Interrupt(step, files).run(action):
        step, interrupted = step + 31, interrupted + 1
        if flags() != before:
            gc.collect()
        assert flags() == before, f"step {step}"
        assert not [switch for switch in SWITCHES if switch._lock._is_owned()]
    assert interrupted > 10


def test_what_is_saved_is_noted():
    seen = []

    def note(t: Tensor) -> Tensor:
        seen.append(t.shape)
        return t.detach()

    x = torch.randn(3, requires_grad=True)
    with noting_saved_tensors(note):
        y = x.exp()
    x.sin()
    assert seen == [(3,)]
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], x.detach().exp())


def test_a_module_runs_in_one_thread_at_a_time():
    inside, most = [], []

    def work() -> None:
        for _ in range(20):
            with torch_settings.module_lock(MODEL), torch_settings.module_lock(MODEL):  # a network may call itself
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    in_threads([work] * 3)
    assert len(most) == 60
    assert max(most) == 1
    assert torch_settings.module_lock(MODEL) is not torch_settings.module_lock(Recurrent())


def test_a_head_leaves_the_random_numbers_as_they_were():
    X = torch.randn(30, 4)
    y = torch.arange(30) % 2
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 5))
    before = torch.get_rng_state()
    for penalty in ("evidence", 1.0):
        linnet.attach_head(model, X, y, penalty=penalty)
        assert torch.equal(torch.get_rng_state(), before)


def test_threads_may_share_a_linearization():
    x = torch.randn(4, 5, 3)
    lin = linnet.linearize(Recurrent().float())
    J = lin.jacobian(x, 2, progress=False)
    U, V = torch.randn(J.shape[0], 3), torch.randn(J.shape[1], 1)
    other = {name: t + 1 for name, t in lin.theta.items()}
    asked = [lambda: J.T @ U, lambda: J @ V, lambda: J.outputs(other), lambda: J.outputs()]
    expected, found = [ask() for ask in asked], []

    def work(i: int) -> None:
        for _ in range(2):
            found.append((i, asked[i]()))

    in_threads([partial(work, i) for i in range(4)])
    assert len(found) == 8
    for i, answer in found:
        torch.testing.assert_close(answer, expected[i])


def test_a_torch_whose_checkpoints_cannot_be_left_out_is_named(monkeypatch):
    torch_settings._check_checkpoints.cache_clear()
    torch_settings._check_checkpoints()  # this version is known
    monkeypatch.setattr(torch_settings, "NO_CHECKPOINTS", {})
    torch_settings._check_checkpoints.cache_clear()
    with pytest.warns(UserWarning, match=r"how torch .* Switch gradient checkpointing off in the network"):
        torch_settings._check_checkpoints()

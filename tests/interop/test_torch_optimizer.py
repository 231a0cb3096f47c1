"""Optimizers in a state tree: filled on the first resume, bit for bit, or refused."""

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import mpickpt.torch  # noqa: E402
from mpickpt import (  # noqa: E402
    LayoutError,
    StateTypeError,
    load_sharded,
    open_checkpoint,
    save_sharded,
)


def model_of(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))


def train(model, optimizer, steps, *schedulers):
    for step in range(steps):

        def closure(step=step):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(step)
            batch = torch.randn(5, 4, generator=generator).to(model[0].weight.dtype)
            loss = model(batch).float().pow(2).mean()
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()


def save(path, **state):
    save_sharded(mpickpt.torch.adapt(state), path, step=0)
    return path


def load(path, options=None, **state):
    return load_sharded(path, like=mpickpt.torch.adapt(state), **(options or {}))


def tensors_of(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    if isinstance(value, list | tuple) or hasattr(value, "__iter__"):
        return (
            [] if isinstance(value, str) else [t for v in value for t in tensors_of(v)]
        )
    return []


def same_state(one, other):
    """Tell whether two optimizers hold the same, types and plain values too."""
    mine, theirs = one.state_dict(), other.state_dict()
    pairs = list(zip(tensors_of(mine), tensors_of(theirs), strict=True))
    equal = all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)
    return equal and repr(mine) == repr(theirs)


class Fp32Moments(torch.optim.Optimizer):
    """Keeps a moment in float32 for parameters of any type, and its steps as int."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["steps"] = 0
                    state["moment"] = torch.zeros_like(parameter, dtype=torch.float32)
                    state["scales"] = [torch.ones(2), {"a": torch.ones(())}]
                state["steps"] += 1
                state["moment"].mul_(0.9).add_(parameter.grad.float())
                state["scales"][0].mul_(1.5)
                parameter.sub_((group["lr"] * state["moment"]).to(parameter.dtype))


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "Adam tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2)),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9, centered=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=2),
    "custom": Fp32Moments,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_new_optimizer_goes_on_as_the_saved_one_would_have(tmp_path, name):
    model, other = model_of(1), model_of(2)
    optimizer, fresh = (OPTIMIZERS[name](m.parameters()) for m in (model, other))
    train(model, optimizer, 3)
    path = save(tmp_path / "c", model=model, optimizer=optimizer)

    load(path, model=other, optimizer=fresh)

    assert same_state(optimizer, fresh)
    for one in ((model, optimizer), (other, fresh)):
        train(*one, 2)
    assert same_state(optimizer, fresh)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.parametrize("name", ["AdamW", "custom"])
def test_bfloat16_parameters_keep_the_types_of_their_moments(tmp_path, name):
    model, other = model_of(1).bfloat16(), model_of(2).bfloat16()
    optimizer, fresh = (OPTIMIZERS[name](m.parameters()) for m in (model, other))
    train(model, optimizer, 2)
    path = save(tmp_path / "c", model=model, optimizer=optimizer)

    load(path, model=other, optimizer=fresh)

    assert same_state(optimizer, fresh)
    kinds = {t.dtype for t in tensors_of(fresh.state_dict()["state"])}
    assert torch.float32 in kinds


def test_optimizer_that_has_gone_on_is_filled_in_place(tmp_path):
    model = model_of(1)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 2)
    path = save(tmp_path / "c", model=model, optimizer=optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    moment = optimizer.state[model[0].weight]["exp_avg"]
    train(model, optimizer, 2)

    load(path, model=model, optimizer=optimizer)

    assert repr(optimizer.state_dict()) == repr(before)
    assert optimizer.state[model[0].weight]["exp_avg"] is moment


def test_optimizer_saved_before_its_first_step_has_no_state_again(tmp_path):
    model = model_of(1)
    optimizer = torch.optim.AdamW(model.parameters())
    path = save(tmp_path / "c", model=model, optimizer=optimizer)
    train(model, optimizer, 2)

    load(path, model=model, optimizer=optimizer)

    assert not optimizer.state


def test_parameter_that_was_never_stepped_has_no_state_again(tmp_path):
    model, other = model_of(1), model_of(2)
    optimizer, fresh = (torch.optim.AdamW(m.parameters()) for m in (model, other))
    model[2].weight.requires_grad_(False)
    train(model, optimizer, 1)
    path = save(tmp_path / "c", model=model, optimizer=optimizer)

    load(path, model=other, optimizer=fresh)

    assert other[2].weight not in fresh.state
    assert same_state(optimizer, fresh)


def test_asking_what_state_there_will_be_changes_nothing():
    model = model_of(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("hook"))
    weights = [p.detach().clone() for p in model.parameters()]
    random = torch.get_rng_state()
    adapted = mpickpt.torch.adapt({"m": model, "o": optimizer, "s": scheduler})

    template = adapted["o"].state_dict_template()

    assert sorted(template["state"]["0.weight"]) == ["exp_avg", "exp_avg_sq", "step"]
    assert not optimizer.state and not calls
    assert all(p.grad is None for p in model.parameters())
    assert all(map(torch.equal, weights, model.parameters()))
    assert torch.equal(random, torch.get_rng_state())
    assert not getattr(optimizer, "_opt_called", False)


def test_nothing_is_made_where_the_optimizer_is_not_loaded(tmp_path):
    model, other = model_of(1), model_of(2)
    optimizer, fresh = (torch.optim.AdamW(m.parameters()) for m in (model, other))
    train(model, optimizer, 2)
    path = save(tmp_path / "c", model=model, optimizer=optimizer)

    load(path, {"only": ["model/*"]}, model=other, optimizer=fresh)

    assert not fresh.state
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_options_of_groups_are_those_that_were_saved(tmp_path):
    model, other = model_of(1), model_of(2)

    def groups(m):
        return [
            {"params": m[0].parameters(), "lr": 0.5},
            {"params": [*m[1].parameters(), *m[2].parameters()]},
        ]

    optimizer = torch.optim.AdamW(groups(model), weight_decay=0.3, betas=(0.5, 0.6))
    optimizer.param_groups[1]["mine"] = "kept"
    fresh = torch.optim.AdamW(groups(other), lr=1.0)
    fresh.param_groups[1]["new"] = 3
    path = save(tmp_path / "c", model=model, optimizer=optimizer)

    load(path, model=other, optimizer=fresh)

    assert [group["lr"] for group in fresh.param_groups] == [0.5, 1e-3]
    assert fresh.param_groups[0]["betas"] == (0.5, 0.6)
    assert fresh.param_groups[1]["mine"] == "kept"
    assert fresh.param_groups[1]["new"] == 3


def test_tensor_of_a_group_stays_the_tensor_that_it_is(tmp_path):
    model = model_of(1)
    rate = torch.tensor(0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    path = save(tmp_path / "c", model=model, optimizer=optimizer)
    rate.fill_(0.25)

    load(path, model=model, optimizer=optimizer)

    assert optimizer.param_groups[0]["lr"] is rate and rate == 0.5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: [{"params": [p]} for p in m.parameters()], "1 parameter groups.*6"),
        (
            lambda m: list(m.parameters())[:-1],
            r"'2\.bias' is in the saved parameter group 0 only",
        ),
        (
            lambda m: [*m.parameters(), nn.Parameter(torch.ones(1))],
            "'0.6' is in the program's parameter group 0 only",
        ),
    ],
    ids=["groups", "fewer", "more"],
)
def test_other_groups_are_an_error(tmp_path, change, words):
    model, other = model_of(1), model_of(2)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    path = save(tmp_path / "c", model=model, optimizer=optimizer)

    with pytest.raises(LayoutError, match=words):
        load(path, model=other, optimizer=torch.optim.AdamW(change(other)))


def test_parameters_in_another_order_are_told_apart_by_name(tmp_path):
    model, other = model_of(1), model_of(2)
    optimizer = torch.optim.AdamW(model.parameters())
    fresh = torch.optim.AdamW(list(other.parameters())[::-1])
    train(model, optimizer, 2)
    path = save(tmp_path / "c", model=model, optimizer=optimizer)

    load(path, model=other, optimizer=fresh)

    for one, another in zip(model.parameters(), other.parameters(), strict=True):
        mine, theirs = optimizer.state[one], fresh.state[another]
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


@pytest.mark.parametrize(
    ("saved", "here"),
    [
        ("AdamW", "SGD momentum"),
        ("AdamW", "AdamW amsgrad"),
        ("AdamW amsgrad", "AdamW"),
        ("SGD momentum", "AdamW"),
    ],
)
def test_optimizer_of_another_kind_is_an_error(tmp_path, saved, here):
    model, other = model_of(1), model_of(2)
    optimizer = OPTIMIZERS[saved](model.parameters())
    train(model, optimizer, 1)
    path = save(tmp_path / "c", model=model, optimizer=optimizer)

    with pytest.raises(LayoutError, match="construct it as the one that was saved"):
        load(path, model=other, optimizer=OPTIMIZERS[here](other.parameters()))


def test_parameters_are_named_by_their_module(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()

    path = save(tmp_path / "c", model=model, optimizer=optimizer)

    with open_checkpoint(path) as checkpoint:
        tree = checkpoint.load("optimizer")
    assert sorted(tree["state"]) == ["0.bias", "0.weight", "1.bias"]
    assert tree["param_groups"][0]["params"] == ["0.weight", "0.bias", "1.bias"]


def test_parameters_of_several_modules_have_their_keys_before_their_names(tmp_path):
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()])

    path = save(tmp_path / "c", one=one, two={"x": two}, optimizer=optimizer)

    with open_checkpoint(path) as checkpoint:
        names = checkpoint.load("optimizer")["param_groups"][0]["params"]
    assert names == ["one.weight", "one.bias", "two/x.weight", "two/x.bias"]


def test_parameters_of_no_module_are_named_by_group_and_index(tmp_path):
    parameters = [nn.Parameter(torch.ones(2)) for _ in "ab"]
    optimizer = torch.optim.SGD([{"params": [p]} for p in parameters], momentum=0.9)
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    optimizer.step()

    path = save(tmp_path / "c", optimizer=optimizer)

    with open_checkpoint(path) as checkpoint:
        assert sorted(checkpoint.load("optimizer")["state"]) == ["0.0", "1.0"]


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.LinearLR(o, total_iters=2),
                torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
            ],
            [2],
        ),
    ],
    ids=["step", "cosine", "one cycle", "lambda", "sequential"],
)
@pytest.mark.parametrize("name", ["AdamW", "Adam tensor lr"])
def test_schedules_go_on(tmp_path, make, name):
    model, other = model_of(1), model_of(2)
    optimizer, fresh = (OPTIMIZERS[name](m.parameters()) for m in (model, other))
    schedule, new = make(optimizer), make(fresh)
    train(model, optimizer, 3, schedule)
    path = save(tmp_path / "c", model=model, optimizer=optimizer, schedule=schedule)

    load(path, model=other, optimizer=fresh, schedule=new)
    train(model, optimizer, 3, schedule)
    train(other, fresh, 3, new)

    assert new.last_epoch == schedule.last_epoch
    assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert same_state(optimizer, fresh)


def test_schedule_by_metric_goes_on(tmp_path):
    optimizer, fresh = (torch.optim.SGD(model_of(1).parameters(), lr=1.0) for _ in "ab")
    schedule, new = (
        torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1)
        for o in (optimizer, fresh)
    )
    for _ in range(2):
        schedule.step(1.0)
    path = save(tmp_path / "c", optimizer=optimizer, schedule=schedule)

    load(path, optimizer=fresh, schedule=new)
    new.step(1.0)

    assert fresh.param_groups[0]["lr"] == pytest.approx(0.1)


def test_state_of_something_that_is_no_parameter_is_refused(tmp_path):
    optimizer = torch.optim.SGD(model_of(1).parameters())
    optimizer.state["shared"]["n"] = 1

    with pytest.raises(StateTypeError, match="none of its parameters"):
        save(tmp_path / "c", optimizer=optimizer)


def test_zero_redundancy_optimizer_is_refused_by_name():
    class ZeroRedundancyOptimizer(torch.optim.SGD):
        pass

    optimizer = ZeroRedundancyOptimizer(model_of(1).parameters())

    with pytest.raises(StateTypeError, match=r"ZeroRedundancyOptimizer .*fully_shard"):
        mpickpt.torch.adapt({"optimizer": optimizer})


def test_numbers_of_an_import_fit_the_tensors_of_an_optimizer(tmp_path):
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
    moments = {
        key: mpickpt.Replicated(torch.full((1, 2), value))
        for key, value in (("exp_avg", 2.0), ("exp_avg_sq", 3.0))
    }
    group = {"params": ["weight"], "lr": 0.25}
    path = save(
        tmp_path / "c",
        optimizer={
            "state": {"weight": {**moments, "step": 7}},
            "param_groups": [group],
        },
        model={"weight": torch.zeros(1, 2)},
    )

    load(path, model=model, optimizer=optimizer)

    state = optimizer.state[model.weight]
    assert state["step"] == 7 and state["step"].dtype == torch.float32
    assert state["exp_avg"].tolist() == [[2.0, 2.0]]
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.param_groups[0]["weight_decay"] == 0.01

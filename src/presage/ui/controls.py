"""The controls of a plan: a labelled field for every knob, with the choices that its model and GPUs leave."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from dash import dcc, html

from presage.configs.frameworks import frameworks
from presage.configs.models import preset_facts
from presage.hardware import platforms
from presage.ui.knobs import KEPT, KNOBS, Knob

if TYPE_CHECKING:
    from presage.configs.job import Job

GROUPS = ("What", "Parallelism", "Training")
CHOSEN = ("tp", "pp", "cp", "ep", "virtual", "micro_batch", "precision")  # whose choices depend on the others
LARGEST = 20  # 2 to the power of it GPUs are the slider's end
MOST_TP, LEAST_TOKENS, MANY = 72, 256, 64
TYPED = ("gpus", "global_batch", "sequence")


def aria(**words: str) -> dict[str, Any]:
    """Attributes for screen readers: aria-label, aria-selected."""
    return {f"aria-{name}": word for name, word in words.items()}


def fields(plan: str, values: Mapping[str, Any]) -> list[Any]:
    """All controls of a plan, in groups."""
    return [
        html.Fieldset([html.Legend(group), *(_field(plan, k, values) for k in KNOBS if k.group == group)])
        for group in GROUPS
    ]


def _field(plan: str, k: Knob, values: Mapping[str, Any]) -> Any:
    ident = {"plan": plan, "knob": k.name}
    name = f"{k.name}-{plan}-label"
    parts = [html.Label(k.label, id=name, title=k.about), _control(k, ident, values.get(k.name))]
    if k.name == "gpus":
        parts.append(_slider(plan, values["gpus"]))
    place = {"plan": plan, "field": k.name}
    return html.Div(parts, id=place, className=f"field {k.name}", title=k.about, role="group", **aria(label=k.label))


def _control(k: Knob, ident: dict[str, str], value: Any) -> Any:
    if k.kind == "price" or k.name in TYPED:
        least, step = (0, "any") if k.kind == "price" else (1, 1)
        return dcc.Input(id=ident, type="number", value=value, min=least, step=step, debounce=0.25, inputMode="numeric",
                         placeholder="per GPU-hour" if k.kind == "price" else "", autoComplete="off")  # fmt: skip
    return dcc.Dropdown(id=ident, options=options_of(k, value), value=value, clearable=False,
                        searchable=k.name in ("model", "platform", "framework"), optionHeight="auto")  # fmt: skip


def _slider(plan: str, gpus: int) -> Any:
    marks = {i: {"label": _short(2**i)} for i in (0, 5, 10, 15, 20)}
    return dcc.Slider(id={"plan": plan, "slider": "gpus"}, min=0, max=LARGEST, step=1, value=round(_log2(gpus)),
                      marks=marks, updatemode="drag", allow_direct_input=False)  # fmt: skip


def _log2(gpus: int) -> float:
    return min(float(LARGEST), float(max(1, gpus).bit_length() - 1))


def _short(count: int) -> str:
    return f"{count >> 20}M" if count >= 1 << 20 else f"{count >> 10}K" if count >= 1 << 10 else str(count)


# ---- choices


def options_of(k: Knob, value: Any) -> list[dict[str, Any]]:
    """The options of a knob before anything else is known."""
    if k.name == "model":
        return _with(_models(), value)
    if k.name == "platform":
        return _with(_clusters(), value)
    if k.name == "framework":
        return _with([_choice(name) for name in frameworks()], value)
    if k.kind == "count":
        return _with([_choice(n) for n in (1, 2, 4, 8, 16)], value)
    return _with([_choice(word) for word in k.words], value)


@cache
def _models() -> list[dict[str, Any]]:
    return [_choice(name, f"{name}, {f['parameters_B']:.4g} B") for name, f in preset_facts().items()]


@cache
def _clusters() -> list[dict[str, Any]]:
    return [_choice(p.key, f"{p.key}: {p.gpu.name}") for p in platforms()]


def _choice(value: Any, label: str | None = None) -> dict[str, Any]:
    return {"value": value, "label": label or str(value)}


def _with(options: list[dict[str, Any]], value: Any) -> list[dict[str, Any]]:
    """What is chosen stays in the list, so that the page can say what is wrong with it."""
    known = any(o["value"] == value for o in options)
    if known or value is None:
        return options
    if value == KEPT:
        return [_choice(KEPT), *options]
    return [*options, {"value": value, "label": f"{value} (not possible)"}]


def choices(job: Job) -> dict[str, list[dict[str, Any]]]:
    """Degrees that divide what they have to, with what the job has now."""
    m, p = job.model, job.parallel
    experts = m.experts.experts if m.experts else 1
    peaks = _precisions(job)
    found: dict[str, tuple[list[Any], Any]] = {
        "tp": ([t for t in divisors(m.heads) if t <= MOST_TP and not m.ffn % t and not job.gpus % t], p.tp),
        "pp": ([n for n in divisors(job.gpus) if n <= min(m.layers + 2, MANY)], p.pp),
        "cp": ([n for n in divisors(job.gpus) if n == 1 or _context(job, n)], p.cp),
        "ep": ([n for n in divisors(experts) if not job.gpus % n], p.ep),
        "virtual": ([n for n in range(1, 17) if n == 1 or (p.pp > 1 and n * p.pp <= m.layers + 2)], p.virtual),
        "micro_batch": ([1 << i for i in range(8) if 1 << i <= job.global_batch], job.micro_batch),
        "precision": (peaks, job.precision),
    }  # fmt: skip
    return {name: _with([_choice(v) for v in values], now) for name, (values, now) in found.items()}


def divisors(n: int) -> list[int]:
    """Up to those that a knob may be turned to."""
    return [d for d in range(1, min(n, 4096) + 1) if not n % d]


def _context(job: Job, n: int) -> bool:
    return n <= MANY and not job.sequence % (2 * n) and job.sequence // n >= LEAST_TOKENS


def _precisions(job: Job) -> list[str]:
    from presage.configs.check import supported
    from presage.configs.job import PRECISIONS

    gpu = job.platform.gpu
    return [p for p in PRECISIONS if supported(p, gpu.peak, gpu.architecture)]

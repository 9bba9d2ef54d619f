"""Arguments of a training script by name: which were read, and which were not understood."""

from __future__ import annotations

import re
from pathlib import Path

from presage.configs.script_arguments import Arguments, number
from presage.errors import InputError

SHOWN = 40  # arguments that are listed
OFF = ("false", "0", "no", "none")
QUIET = re.compile(  # of no matter for a step's time: not worth a note
    r"^(lr|min_lr|lr_.*|adam_.*|sgd_.*|weight_decay.*|clip_grad|init_method.*|log_.*|tensorboard.*|wandb.*|save.*|load.*|no_load.*|"
    r"no_save.*|eval_.*|train_.*|data_.*|.*data_path|data|split|seed|vocab_file|merge_file|tokenizer_.*|exit_.*|num_workers|"
    r"rotary_.*|rope_.*|norm_epsilon|layernorm_epsilon|master_.*|node_rank|rdzv_.*|tee|max_restarts|distributed_.*|ckpt_.*|"
    r"mock_data|loss_scale.*|initial_loss_scale|min_loss_scale|hysteresis|profile.*|use_mcore_models|timing_log.*|"
    r"override_opt.*|finetune|manual_gc.*|job_name|partition|account|time|output|error|container_.*|wait|jobid|"
    r"kill_.*|check_for_nan.*|attention_softmax_in_fp32|apply_.*|reset_.*|eod_.*|dataloader_type|ntasks.*|cpus.*|"
    r"moe_(aux_loss|z_loss|grouped|permute|router_(?!topk$|num_groups|group_topk)|per_layer|input|apply|pad_expert).*|"
    r"decoupled_.*|dist_ckpt.*|async_save|no_mmap.*|"
    r"dataset.*|output.*|fp8_amax.*|calculate_per_token_loss|use_cpu_init.*|no_create_attention.*|tiktoken.*)$"
)


class GivenArguments:
    """Arguments by name; records which were read."""

    def __init__(self, found: Arguments, path: str | Path) -> None:
        self.found, self.path, self.asked = found, path, set[str]()

    def __contains__(self, name: str) -> bool:
        self.asked.add(name)
        return name in self.found

    def flag(self, *names: str) -> bool:
        """Whether one of these flags is given, and not as false."""
        values = [self.found[n][-1] for n in names if n in self]
        return any(not v or v[0].lower() not in OFF for v in values)

    def off(self, name: str) -> bool:
        """Whether one of these flags is given as false."""
        return name in self and bool(self.found[name][-1]) and self.found[name][-1][0].lower() in OFF

    def any(self, name: str, part: str) -> bool:
        """One of the values an argument is given has this in it."""
        return name in self and any(part in v.lower() for values in self.found[name] for v in values)

    def text(self, *names: str) -> str | None:
        self.asked.update(names)
        for name in names:
            if name in self:
                values = self.found[name][-1]
                if not values or not values[0]:
                    raise InputError(self.path, "has no value: is its variable set elsewhere?", argument_flag(name))
                return values[0]
        return None

    def whole(self, *names: str) -> int | None:
        return whole_number(self.number(*names))

    def number(self, *names: str) -> float | None:
        value = self.text(*names)
        if value is None or value.lower() in ("none", "null"):
            return None
        try:
            return number(value)
        except ValueError as e:
            raise InputError(self.path, f"is {value!r}: it should be a number", argument_flag(names[0])) from e

    def several(self, name: str) -> list[str]:
        return [v for v in self.found[name][-1] if v] if name in self else []

    def notes(self) -> tuple[str, ...]:
        """Arguments not read, and those read that are given twice with other values."""
        unread = [argument_flag(n) for n in self.found if n not in self.asked and not QUIET.match(n)]
        ours = self.asked - {"name", "type"}  # NeMo's, of many things
        twice = [n for n in self.found if n in ours and len({tuple(v[:1]) for v in self.found[n]}) > 1]
        more = [f"and {len(unread) - SHOWN} more"] if len(unread) > SHOWN else []
        out = [f"not read: {', '.join([*unread[:SHOWN], *more])}"] if unread else []
        out += [f"{argument_flag(n)} is given more than once: the last is taken" for n in twice]
        return tuple(out)


def argument_flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def whole_number(value: float | None) -> int | None:
    return None if value is None else int(value)

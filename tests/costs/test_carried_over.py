"""What carries over to GPUs that were never calibrated: second reads from L2, and float32 corrections by half."""

from __future__ import annotations

import numpy as np
import pytest

from presage.costs.calibrated_kernels import call_times
from presage.costs.call import Call, Shape
from presage.costs.corrections import FP32_CARRIED, Fp32GemmCorrection, transfer_streaming
from presage.costs.families import gemm, norm
from presage.costs.kernel_files import load
from presage.costs.rates import Rates
from presage.hardware import gpu


def rows(count: int, width: int, dtype: str = "float32") -> Shape:
    return Shape((count, width), (width, 1), dtype)


def layer_norm(width: int, count: int = 65536, dtype: str = "float32") -> Call:
    weights = Shape((width,), (1,), dtype)
    return Call("aten::native_layer_norm", (rows(count, width, dtype), (width,), weights, weights, 1e-5))


@pytest.mark.parametrize(
    ("name", "widest"), [("l4", 9039), ("a100_pcie_40gb", 3034), ("t4", 1638), ("v100_pcie_32gb", 614)]
)
def test_a_second_read_is_from_l2_where_the_rows_in_flight_fit(name: str, widest: int) -> None:
    """Two tensors of `sms` x blocks x width x 4 bytes."""
    card = gpu(name)
    assert 2 * card.sms * (card.threads_per_sm // 128) * widest * 4 <= card.l2
    assert norm.from_memory(layer_norm(widest), card) == 2 / 3
    assert norm.from_memory(layer_norm(widest + 1), card) == 1.0
    assert norm.from_memory(layer_norm(2 * widest, dtype="bfloat16"), card) == 2 / 3
    assert norm.from_memory(Call("aten::native_batch_norm", layer_norm(64).inputs), card) == 1.0


def test_wide_rows_take_half_as_long_again() -> None:
    """Four columns more and the second read is from memory: 3 transfers where there were 2."""
    models = load("l4")
    fits, does_not = (t.warm for t in call_times(models, [layer_norm(9036), layer_norm(9040)]))
    assert does_not / fits == pytest.approx(1.5, rel=0.01)


def test_a_gpu_like_the_calibrated_one_takes_as_long() -> None:
    models, card = load("h200"), gpu("h200")
    calls = [layer_norm(1024), layer_norm(8192), layer_norm(256, 512)]
    laws = [norm.law(c, Rates.of(card)) for c in calls]
    warm, _ = transfer_streaming(norm.FAMILY, models.trees["norm"], calls, laws, card, card)
    assert warm == pytest.approx([t.warm for t in call_times(models, calls)])


class Constant:
    """Trees that always say a third."""

    def predict(self, x: np.ndarray) -> np.ndarray:
        return np.full(len(x), np.log(4 / 3))


def test_float32_corrections_count_by_half_on_chips_that_were_not_fitted() -> None:
    call = Call("aten::mm", (rows(4096, 1024), rows(1024, 1024)))
    found = Fp32GemmCorrection(Constant())  # type: ignore[arg-type]
    for name, share in (("a100_80gb", 1.0), ("t4", 1.0), ("l4", FP32_CARRIED), ("rtx3090", FP32_CARRIED)):
        card = gpu(name)
        rates = Rates.of(card)
        law = gemm.law(call, rates)
        out = found.corrected(np.zeros(1), [call], [law], rates, float(card.compute_capability))
        assert out[0] == pytest.approx(share * np.log(4 / 3)), name


def test_no_kernel_is_shorter_than_traces_of_its_architecture_show() -> None:
    """Short kernels take as long as fills of one block do in traces of V100s; long ones, and an H100's, are as they
    were."""
    models = load("v100_32gb")
    assert models.shortest == 2e-6
    short, long = (Call("aten::relu", (rows(n, 64),)) for n in (8, 1 << 20))
    times = call_times(models, [short, long])
    assert 2e-6 < times[0].warm < 3e-6
    assert times[1].warm > 100 * models.shortest
    hopper = load("h100_sxm")
    assert hopper.shortest == 0.0 and call_times(hopper, [short])[0].warm < 2e-6

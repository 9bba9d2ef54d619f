"""The words of docs/runs.md; its figures are put in by make_runs.py. Times of rows are as the table has them."""

from __future__ import annotations

BARS = {
    "megatron_sc21_t1": 0.07, "vtrain_multi": 0.12, "vtrain_single": 0.12, "dgxc": 0.08, "llm_foundry": 0.08,
    "simumax_b200": 0.06, "mlperf_gpt3": 0.08, "mlperf_405b": 0.08,
}  # fmt: skip
MEDIAN, MAPE, MEMORY = 0.08, 0.11, 0.06

WHAT = {
    "megatron_sc21_t1": "Megatron-LM of 2021, GPT of 18B to 1T, 256 to 3,072 A100",
    "torchtitan": "Llama 2 and 3, FSDP2, tensor and context parallel, A100, H100 of 500 W, H200",
    "llm_foundry": "MPT of 125M to 70B, FSDP, 8 to 512 A100 and H100",
    "megatron_bridge": "NVIDIA's tables of releases 25.09 to 26.08, dense and experts, H100 to GB300",
    "dgxc": "NVIDIA's DGX Cloud recipes, 16 to 2,304 H100, GB200",
    "internevo": "7B, ZeRO-1 over groups or all of 8 to 1,024 A100",
    "bloom_prequel": "176B to 196B, one reading each, 320 to 384 A100 on Omni-Path",
    "simumax_b200": "Megatron-LM, cut to few layers, nothing overlapped, 8 B200",
    "vtrain_multi": "GPT of 3.6B to 175B, 64 to 512 A100",
    "vtrain_single": "small GPTs in every plan, 2 to 8 A100: vTrain's predictions, not measured",
    "mlperf_gpt3": "GPT-3 175B in fp8, 512 to 10,240 H100",
    "mlperf_405b": "Llama 3.1 405B in fp8, 256 to 8,192 H100, H200, GB200",
    "neusight_train": "fp32 on one GPU or four: V100, A100, H100, L4, MI210, MI250",
}
# Errors of others on the same sources, which the bars were set against.
PEERS = {
    "megatron_sc21_t1": ("Calculon 10.3%",),
    "vtrain_multi": ("Calculon 15.4%", "vTrain itself 14.7%"),
    "vtrain_single": ("Calculon 38.9%", "vTrain itself 8.4%"),
    "mlperf_gpt3": ("Calculon 14.1%, on GPT-3 on H100s",),
    "simumax_b200": ("SimuMax itself 5.6%",),
}

INTRO = """\
# How right predictions of jobs are, on published training runs

Written by `make accuracy` (docs/make_runs.py) from `public_runs.csv`: runs that others measured and published, one
a row, each predicted from its configuration alone ([jobs](jobs.md)). `presage accuracy runs FILE.csv --out
rows.csv` prints the same errors and writes every row; it takes tables of your own in the same columns. Errors are
of seconds a step, as shares of the measured.

Unless stated otherwise a figure is **left out**: with the three fitted factors as they come out without any row of
that source. *As shipped* is with all rows in the fit, *laws alone* without fitted factors. What left-out figures do
not show is [below](#what-was-chosen-with-errors-in-view). More than half of the rows are
[no measured steps](#rows-that-another-simulator-made).
"""

FITTED = """\
A row becomes a job: its model, batch, parallelism, precision and recomputation as the row says them, what it does
not say as its framework does by default (`src/presage/configs/frameworks`), a cluster made of its GPU and of what it
says of the links. The step is worked out from laws: kernels of [chips](chips.md), [collectives](collectives.md),
host time of a layer's ops, the pipeline through the engine, power. Then three factors, the same for every source,
model, GPU and framework:

- `product`: products on tensor cores take this many times the law; operands come from memory rather than
  from cache, and other things run alongside them;
- `backward`: those of the backward pass, a further factor;
- `experts`: the host takes this many times as long for experts' layers as their counted launches and collectives
  do by themselves (`data/layer_host.toml`).

`tools/fit_runs.py` fits them: logarithms of predicted over measured step times, least squares with Huber's weights
(a row more than 10% off counts less), every source once however many rows it has (at most 150 of one take part,
evenly taken), each factor's logarithm held towards 0 with a standard deviation of 0.15 (`experts`: 0.7) against 0.14
for a source's error. The steps by dispatcher take part as a source of their own. Nothing is fitted by source, model,
GPU, framework or row. fp32 has no factor: neusight_train has no part in it. Nor has vtrain_single: its rows are no
measured steps."""

SIMULATED = """\
vtrain_single's 720 rows, published as measured (`ground_truth_single.csv`), are what vTrain's own predictor makes of
traces. They say so themselves:

- Steps are linear in microbatches and in layers to the microsecond: of the 64 groups with three or more numbers of
  microbatches none is 1 us off a straight line, in steps of up to 1.9 s. No machine repeats that.
- From two pipeline stages to four they grow by four sends whose time is 2 x activations / 25 GiB/s: 2.500 ms for
  33.6 MB within a node, where NVLink takes 0.15. That is `_compute_p2p_latency` of its predictor.py, a quarter of
  800 Gb/s, to four digits (`tests/validation/test_accuracy_runs.py`).
- A layer's time depends on hidden size, tensor parallelism and microbatch alone, as its files of traces do
  (`trace_HIDDEN_TP_MICROBATCH`): 28 numbers, and what ends, optimizer and gradients add, make the 720 rows. They
  are one recording each, and not smooth: with tp 8 a microbatch of two takes less (3.9 ms a layer) than of one (4.8),
  with tp 4 2.7 ms for two and 5.0 for four.

So they are read as what they are: without recomputation (the predictor has none on the last stage, and all stages have
layers of one length; with it, products of large microbatches would run at some 290 of an A100's 312 TFLOP/s by our
count of their memory traffic), and with the host of a layer on one rank under a profiler, 1 / 0.70 of its usual time
([overheads](overheads.md): the PyTorch profiler's on an H200, vTrain's records less). Nothing is fitted to them, and
they have no part in the fit. Errors on them, left out: 10.6% read as their configuration states it, 17.2% without
recomputation on a usual host, 7.5% as read, 8.1% with exchanges after the host's launches, as the predictor
puts them and presage's engine does not. The choice was made with these errors in view. Where GEMMs decide they now need
the factor that measured sources do; before, an A100 of vTrain's seemed to need 1.04 where others need 1.1 to 1.4.
vtrain_multi has none of these signs: a repeated step differs (53.91 and 53.94 s)."""

CHOSEN = """\
The left-out figures show that three factors carry over from source to source. They are not what presage would make of
a source that no one has looked at: these rows were in view while the rest was made, and the left-out MAPE fell from
14.0% with the first whole version of jobs to what stands above, nearly all of it by changes of laws and facts.
Expect more on your own runs. In particular:

- **The prior's width**, 0.15, was picked with left-out errors in view. In the table below (measured steps, errors
  linearised about the fit that ships, bold: misses its bar) a narrower one misses the overall median, a wider one
  megatron_sc21_t1 and vtrain_multi. The runs tell what both factors make together and hardly which is which: without
  a prior forward GEMMs would be as fast as by themselves, and all would fall on the backward pass.
- **That there are two factors of GPU work.** Eight were fitted before (also attention, memory-bound kernels, links
  within and between nodes, the host and waits), with a wider prior, a source counting by the root of its rows:
  10.6% over all, megatron_sc21_t1 8.3%, vtrain_multi 13.6%. Two, and every source once, came after that.
- **How vtrain_single is read**, [below](#rows-that-another-simulator-made), and that starts and hops of collectives
  are counted in clocks ([collectives](collectives.md)).
- **Experts.** That no host runs ahead of an exchange with experts, that a token over EFA takes the geometric mean of
  two benchmarks, and what of the host's work is counted in an experts' layer were chosen with the steps by
  dispatcher and megatron_bridge in view. The factor `experts` differs: 1.55 without the former, 1.84 without
  the latter.
- **Facts of frameworks** (what is fused, what overlaps, bytes of gradients, who waits for whom) are from the code
  and files they name, but which ones matter was learned from these rows. So were the readings of rows' notes and of
  texts about links ("1600G RoCE/node").
- **Energies and memory shares.** The H200's are measured. An A100's energy a FLOP is the H200's by what its process
  is said to differ, a B200's in bf16 and the shares of its bandwidth that kernels reach are from SimuMax's
  published system file. The simumax_b200 rows come from the same people: that source is not left out of everything."""

OTHERS = """\
Errors of others are those the bars were set against, not run again here; where the notes of rows have what the tool
that published them predicted, its error on these rows stands beside. They are no blind figures either."""

TWINS = """\
Some rows are one job to presage: successive releases of the same recipe, repeated readings. The best any model
could do that sees what presage sees is to be right about the middle of them; what is left then is in the last
column but one. A release can be worth more than most knobs: gpt-oss-120b on 64 GB200 took 2.83, 4.48 and 2.86 s in
three of them, Grok-1 on 512 H100 21.0 and 15.9 s."""

WORST = """\
One line a job, with the worst of its rows. The reasons are from the row's notes and its neighbours in the table,
and from code where it is named; where they do not show it, this is stated."""

GPT_OSS = (
    "all rows of gpt-oss come out too fast, on every GPU: clamped activations and biases of experts are "
    "counted; widths of 2,880 that are no multiple of a tile and attention sinks are likely, none was measured"
)
GB300 = (
    "jobs on GB300 other than gpt-oss come out too slow: its published dense peaks are those of GB200 and "
    "presage follows them, but Llama 3.1 405B in fp8 took 61 to 63 s on 256 GB200 and 47 to 50 s on 256 "
    "GB300"
)
RELEASES = (
    "a known regression of that release, by the row's own notes; the releases before and after took 2.83 "
    "and 2.86 s. For what is left see gpt-oss in bf16"
)
# The first pattern that fits "source job" tells.
CAUSES = (
    (
        r"qwen3-30b-a3b on 8 B200,.* mb1",
        "one sequence a microbatch and 128 small experts: the host is the limit; counted too high here with the "
        "factor of other sources",
    ),
    (r"gpt-oss-120b on 64 GB200,.*mxfp8", RELEASES),
    (
        r"gpt-oss-120b on 64 B300",
        "experts are spread over eight nodes, on NVL72 the same job takes 4.2 s: dispatch between nodes is "
        "too fast, and gpt-oss is too fast everywhere",
    ),
    (r"gpt-oss", GPT_OSS),
    (
        r"internevo .* on 1024 .*mb2, batch 8192",
        "ZeRO-1 over all ranks: over groups of 8 the same job takes 4.52 s on 1,024. InternEvo sends "
        "parameters by one broadcast a rank (`broadcasts` of its framework), whose ring has a hop for each rank",
    ),
    (
        r"vtrain_multi gpt on 64 A100, tp8 .*mb64",
        "not explained: with microbatches of 16 the same job takes 5.02 s. presage needs 45 GiB for these, "
        "and the A100's memory is not stated",
    ),
    (
        r"neusight_train gpt2_large on 1 AMD.*mb4",
        "the forward pass took longer (1,116 ms) than the backward one (728 ms), with one sequence it did not "
        "(114 and 199): a slow kernel of the library. NeuSight itself is 33% too fast",
    ),
    (
        r"qwen3-235b-a22b on 256 H100.*fp8$",
        "its notes name DeepEP, those of the same recipe in three other releases do not, and took as long "
        "(76.6 to 80.3 s): what presage takes off for it was not seen here",
    ),
    (
        r"torchtitan llama3-8b on 8 H100-96.*cp8",
        "ring attention over 262,144 tokens. At 32,768 tokens without it the error is half of this one, so a "
        "part is attention on a 500 W card, the rest what context parallelism adds in PyTorch",
    ),
    (
        r"torchtitan llama3-70b.*fp8-rowwise",
        "fp8 with scales by rows gained nothing on this card: 27.3 s, and 27.4 s in bf16 on the same page. Casts by "
        "rows and by columns are counted; an 8B of a commit message has 137 ms a step more than by tensor, presage 43",
    ),
    (
        r"qwen3-235b-a22b on 256 B200",
        "the host of 16 experts a rank without CUDA graphs is counted at 16 ms a layer, where the whole one takes 11; "
        "the factor of experts' hosts is between NVIDIA's runs (1.5 without AWS's) and AWS's",
    ),
    (r"(deepseek-v3|llama3.1-405b|qwen3-235b-a22b) on 256 GB300", GB300),
    (
        r"simumax_b200 .* tp8 ",
        "not proven, most likely the host; SimuMax itself is 9% and 11% too fast here",
    ),
    (
        r"bloom_prequel gpt-182B .* tp4 pp12x1 .*mb4",
        "128 heads of width 108, no multiple of 8: 154 s where 96 heads took 110 s; presage sees less of it",
    ),
    (
        r"bloom_prequel",
        "one reading of one step on a machine that was being repaired that week (PCIe and NUMA)",
    ),
)

OWN = """\
Twelve steps of Llama-like models on one H200 (`tools/measure_steps.py`, data/h200_jobs/steps.json: Hugging Face's
eager code, bf16, fused AdamW), with the factors as shipped. No row of theirs is in any fit. When they were first
measured the eleven GPU-bound ones were 7.6% off, the host-bound one -26%: the blind figures, on one GPU whose kernels
we measured. Then the passes of eager norms, rotations and gates were counted right and the attention kernel taken
from a trace, so the figures below are none any more. Peak memory is what PyTorch reserved; the allowance for what its
allocator holds back is from the runs above, where more was held back."""

HERD = {8192: 430, 16384: 400}
NOT_IN_TABLE = """\
Llama 3.1 405B as Meta trained it (arXiv 2407.21783, table 4; 8,192 tokens, 2,048 samples), taken as NeMo's with the
optimizer sharded: how many chunks a stage had is not published (8 taken), nor how FLOPs were counted (a few percent).
Nothing was tuned on it. A run of months on one's own software is further from what presage says than vendors' tables
are; waits for slow ranks are not in these predictions."""

SAID = """\
`yes`: the source states all of it; `preset`: recomputation is from the recipe's preset; `assumed`: a field is an
assumption (vTrain's precision and vocabulary)."""

RECOMMEND = """\
Another kind of job ([sharding](sharding.md)), with no part in the fit: MLPerf DLRM-DCNv2 as HugeCTR runs it, on GPUs
with NVLink. Four runs on PCIe machines are predicted 35% to 74% too fast."""

DISPATCHERS = """\
`aws_moe_runs.csv`: Qwen3-30B-A3B on 64 H100 with EFA, by dispatcher, expert parallelism and microbatch, with exchanges
overlapped or not. `presage accuracy runs RUNS.csv MORE.csv` takes both tables. The rows without overlap are read with
full recomputation, as their recipe has it and their page does not. Here most of a step is the host's: a layer of a
microbatch takes 16 to 23 ms whether it has 4,096 tokens or 16,384. A pair is two runs that differ in their
dispatcher alone."""

SHORT = """\
Not reached, left out as above: B200, B300 and GB300. GB300 is too slow where large fp8 GEMMs decide (Llama 405B 20 to
28%, DeepSeek-V3 8 to 22%) while GB200 is right (0 to 5% on the same models): the same job is 1.2 to 1.34 times as
fast on GB300, of which its power limit (1,400 W to 1,200) explains 1.08 and its data sheet nothing, and its own kernels
were never measured (parameters are a B200's). With GEMMs that keep a Hopper's share of the peak it is 12.5% off
instead of 13.3%, Llama 405B as much as before. Qwen3-235B on B200 waits for the host by presage and not in truth (42%
too slow, two rows); gpt-oss is too fast.
TorchTitan's rows miss the 9% they were asked for: 12 of 20 are on an H100 of 500 W on which all but Llama 405B comes
out too fast, in bf16 too (7 to 10%), and more so in fp8 by rows and over 262,144 tokens (see the worst jobs).
Hybrids' rows state neither dispatcher, nor CUDA graphs, nor recomputation, and are read with Megatron-Core's defaults.
With what Megatron-Bridge's recipes of one later commit set (HybridEP, graphs, recomputation on H100) Nemotron 3 Nano
comes out 10 to 25% too fast and Super 11 to 36%, Nemotron-H without experts is 14 to 18% too fast anyway: the law of
Mamba-2's scans, which were never measured, is too quick, and costs of the default dispatcher make up for it. Three rows
(Super on B200, Ultra) cannot be without recomputation, for they would not fit; they are left out.
Where GEMMs decide, vtrain_multi's and SC'21's need 1.04 to 1.09 times the law, those of other A100 sources 1.1 to 1.4
times and an H100's 1.15 to 1.3: no size, shape, precision or overlap that rows state tells them apart.
Kernels of a Megatron-LM trace on A100s (forward only): dense GEMMs 258 to 263 TFLOP/s where the law has 243 to 250, the
batched ones of attention 1.3 to 1.5 times as fast as by the law, its softmax 1.5 times as slow, which cancel. BLOOM's
rows are 2% off with tp 4 and 11 to 18% too fast with tp 8.
ZeRO-3 of SC'21 (arXiv 2104.04473, table 2, from general knowledge of the paper and not in this table): its steps stop
getting shorter with more GPUs where 3 x 2 bytes a parameter go through each GPU's own card at 16 to 18 GB/s. presage
takes such gathers over each rank's card (`flat_gathers`): 8 to 24% too fast on those six steps. With gathers over all
cards of a node it was 50% too fast."""

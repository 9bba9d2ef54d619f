"""The words of docs/runs.md."""
BARS = {
    "megatron_sc21_t1": 0.07, "vtrain_multi": 0.12, "vtrain_single": 0.12, "dgxc": 0.08, "llm_foundry": 0.08,
    "simumax_b200": 0.06, "mlperf_gpt3": 0.08, "mlperf_405b": 0.08,
}  # fmt: skip
PEERS={};WHAT={};CAUSES=();INTRO=FITTED=CHOSEN=TWINS=WORST=RECOMMEND="x"

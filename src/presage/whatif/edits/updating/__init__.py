"""What the edits of optimizers are made of: a step's updates as its ops tell them (`updates`, `lanes`, `numbers`), and
the ops of torch's optimizers in their forms (`foreach` over `lists`, `fused`, `loop`)."""

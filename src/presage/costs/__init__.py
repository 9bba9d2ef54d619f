"""What things cost: kernels, host overheads (T1 to T5), collectives; and the packs those are fitted from."""

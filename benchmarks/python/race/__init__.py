"""The parts of race_ddp.py: what every rival trains (model), how (rivals), in which process (processes, worker)."""

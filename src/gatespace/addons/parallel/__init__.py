"""One run in several processes: DDP and FSDP2 over torch.distributed, and the launcher behind `--processes`."""

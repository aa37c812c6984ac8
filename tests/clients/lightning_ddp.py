#!/usr/bin/env python3
"""PyTorch Lightning on mccs: data-parallel training by its own launcher, beside the same training on one GPU.

usage: lightning_ddp.py NRANKS, with LD_PRELOAD naming our libnccl.so.2 and MCCS_SOCKET the service"""

import logging
import os
import sys

import torch

import training


class Batches(torch.utils.data.Dataset):
    """Sample n * ranks + r is one of rank r: the sampler deals samples out in turn."""

    def __init__(self, nranks):
        parts = [[training.batch(step, rank) for rank in range(nranks)] for step in range(training.STEPS)]
        self.samples = [
            (parts[step][rank][0][sample], parts[step][rank][1][sample])
            for step in range(training.STEPS) for sample in range(training.SAMPLES_OF_RANK) for rank in range(nranks)
        ]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


def main(nranks):
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def train_dataloader(self):
            batches = Batches(nranks)
            # Lightning's own shuffles.
            sampler = torch.utils.data.DistributedSampler(batches, nranks, self.global_rank, shuffle=False)
            return torch.utils.data.DataLoader(batches, batch_size=training.SAMPLES_OF_RANK, sampler=sampler)

        def __init__(self):
            super().__init__()
            self.network = training.model()

        def training_step(self, data, _):
            loss = training.loss_of(self.network, data)
            # Reduced over ranks.
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self):
            return training.optimizer_of(self.network)

    module = Module()
    trainer = lightning.Trainer(accelerator="gpu", devices=nranks, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
                                enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False)
    trainer.fit(module)
    rank = trainer.global_rank
    gathered = trainer.strategy.all_gather(torch.tensor([float(rank)], device=trainer.strategy.root_device))
    assert gathered.flatten().tolist() == [float(other) for other in range(nranks)]
    training.check("Lightning", module.to(trainer.strategy.root_device).network, nranks, rank, trainer.strategy.root_device)
    if rank == 0:
        print(f"Lightning: {training.STEPS} steps on {nranks} GPUs give the weights of one GPU")


if __name__ == "__main__":
    # The launcher starts this program anew for each other rank.
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(training.free_port()))
    main(int(sys.argv[1]))

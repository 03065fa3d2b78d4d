# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning: a learner pushes its weights to actors and gathers their experience.

Run it:  torchrun --nproc-per-node 2 examples/actor_learner.py

Rank 0 learns which of a few slot machines pays most; the others play with the policy they were
given last.
"""

import torch

import fastcoll

PAYS = torch.tensor([0.1, 0.5, 0.9, 0.3])  # chance of winning at each machine
ROUNDS, PLAYS, RATE, LEARNER = 60, 32, 0.5, 0


def play(policy: torch.Tensor, actor: int, round_: int) -> torch.Tensor:
    """Return an actor's experience: rows of (machine, reward)."""
    generator = torch.Generator().manual_seed(1000 * actor + round_)
    machines = torch.multinomial(policy.softmax(0), PLAYS, replacement=True, generator=generator)
    wins = torch.rand(PLAYS, generator=generator) < PAYS[machines]
    return torch.stack([machines.float(), wins.float()], 1)


def learned(policy: torch.Tensor, experience: torch.Tensor) -> torch.Tensor:
    """Take one step of the policy gradient (REINFORCE with the mean as baseline)."""
    machines, rewards = experience[:, 0].long(), experience[:, 1]
    chosen = torch.nn.functional.one_hot(machines, len(PAYS)).float()
    advantage = (rewards - rewards.mean()).unsqueeze(1)
    return policy + RATE * (advantage * (chosen - policy.softmax(0))).mean(0)


def main() -> None:
    with fastcoll.init() as group:
        n, learns = group.world_size, group.rank == LEARNER
        policy = torch.zeros(len(PAYS))
        for round_ in range(ROUNDS):
            fastcoll.broadcast(policy, LEARNER)
            mine = torch.zeros(PLAYS, 2) if learns else play(policy, group.rank, round_)
            everybodys = torch.empty(n, PLAYS, 2)
            fastcoll.gather(mine, list(everybodys) if learns else None, LEARNER)
            if learns:
                policy = learned(policy, everybodys[1:].flatten(0, 1))

        if learns:
            alone = torch.zeros(len(PAYS))
            for round_ in range(ROUNDS):
                plays = [play(alone, actor, round_) for actor in range(1, n)]
                alone = learned(alone, torch.cat(plays))
            torch.testing.assert_close(policy, alone, rtol=0, atol=0)
            for chance, preference in zip(PAYS, policy.softmax(0), strict=True):
                print(f"machine that pays {chance:.0%}: chosen in {preference:.0%} of the plays")
            print("the policy has the bits of one process that plays for all actors")
            print("Look at: in lockstep all experience is of the newest policy. A learner that")
            print("does not wait (async_op=True) must correct for experience of older ones.")


if __name__ == "__main__":
    main()

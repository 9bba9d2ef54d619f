"""DQN on pixels, as CleanRL's single file: replay buffer in host memory, a target network, an update every 4 steps."""

import argparse
import random
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--total-timesteps", type=int, default=10_000_000)
    p.add_argument("--learning-rate", type=float, default=1e-4)
    p.add_argument("--buffer-size", type=int, default=4000)
    p.add_argument("--gamma", type=float, default=0.99)
    p.add_argument("--target-network-frequency", type=int, default=1000)
    p.add_argument("--batch-size", type=int, default=512)
    p.add_argument("--start-e", type=float, default=1.0)
    p.add_argument("--end-e", type=float, default=0.01)
    p.add_argument("--exploration-fraction", type=float, default=0.1)
    p.add_argument("--learning-starts", type=int, default=1000)
    p.add_argument("--train-frequency", type=int, default=4)
    return p.parse_args()


class SyntheticAtari:
    def __init__(self, seed, actions=6):
        self.actions, self.rng = actions, np.random.default_rng(seed)
        self.frames = self.rng.integers(0, 256, (16, 4, 84, 84), dtype=np.uint8)
        self.t = 0

    def reset(self):
        return self.frames[0]

    def step(self, action):
        self.t += 1
        done = self.rng.random() < 0.01
        return self.frames[self.t % 16], float(self.rng.random() < 0.1), done


class ReplayBuffer:
    def __init__(self, size, device):
        self.obs, self.next_obs = (np.zeros((size, 4, 84, 84), dtype=np.uint8) for _ in range(2))
        self.actions = np.zeros((size, 1), dtype=np.int64)
        self.rewards, self.dones = (np.zeros((size, 1), dtype=np.float32) for _ in range(2))
        self.size, self.pos, self.full, self.device = size, 0, False, device

    def add(self, obs, next_obs, action, reward, done):
        i = self.pos
        self.obs[i], self.next_obs[i], self.actions[i] = obs, next_obs, action
        self.rewards[i], self.dones[i] = reward, done
        self.pos = (i + 1) % self.size
        self.full = self.full or self.pos == 0

    def sample(self, n):
        i = np.random.randint(0, self.size if self.full else self.pos, n)
        parts = (self.obs, self.next_obs, self.actions, self.rewards, self.dones)
        return [torch.as_tensor(part[i]).to(self.device) for part in parts]


class QNetwork(nn.Module):
    def __init__(self, actions):
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(4, 32, 8, stride=4), nn.ReLU(), nn.Conv2d(32, 64, 4, stride=2), nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=1), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(),
            nn.Linear(512, actions),
        )  # fmt: skip

    def forward(self, x):
        return self.network(x / 255.0)


def linear_schedule(start_e, end_e, duration, t):
    return max((end_e - start_e) / duration * t + start_e, end_e)


if __name__ == "__main__":
    args = parse_args()
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    env = SyntheticAtari(args.seed)
    q_network, target_network = QNetwork(env.actions).to(device), QNetwork(env.actions).to(device)
    optimizer = torch.optim.Adam(q_network.parameters(), lr=args.learning_rate)
    target_network.load_state_dict(q_network.state_dict())
    rb = ReplayBuffer(args.buffer_size, device)
    start_time, obs = time.time(), env.reset()
    for global_step in range(args.total_timesteps):
        epsilon = linear_schedule(
            args.start_e, args.end_e, args.exploration_fraction * args.total_timesteps, global_step
        )
        if random.random() < epsilon:
            action = random.randrange(env.actions)
        else:
            q_values = q_network(torch.Tensor(obs[None]).to(device))
            action = torch.argmax(q_values, dim=1).cpu().numpy()[0]
        next_obs, reward, done = env.step(action)
        rb.add(obs, next_obs, action, reward, done)
        obs = env.reset() if done else next_obs
        if global_step > args.learning_starts and global_step % args.train_frequency == 0:
            b_obs, b_next, b_actions, b_rewards, b_dones = rb.sample(args.batch_size)
            with torch.no_grad():
                target_max, _ = target_network(b_next).max(dim=1)
                td_target = b_rewards.flatten() + args.gamma * target_max * (1 - b_dones.flatten())
            old_val = q_network(b_obs).gather(1, b_actions).squeeze()
            loss = F.mse_loss(td_target, old_val)
            if global_step % 100 == 0:
                sps = int(global_step / (time.time() - start_time))
                print(f"SPS {sps} loss {loss.item():.4f} q {old_val.mean().item():.3f}")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if global_step % args.target_network_frequency == 0:
                for target_param, q_param in zip(target_network.parameters(), q_network.parameters()):
                    target_param.data.copy_(q_param.data)

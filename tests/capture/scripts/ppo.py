"""PPO in the style of single-file implementations: rollouts on the GPU, then epochs of minibatch updates."""

import numpy as np
import torch
from torch import nn
from torch.distributions.categorical import Categorical

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
num_steps, num_envs, minibatches = 16, 4, 4


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))

    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


agent = Agent().to(device)
optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
obs = torch.zeros((num_steps, num_envs, 4)).to(device)
actions = torch.zeros((num_steps, num_envs)).to(device)
logprobs = torch.zeros((num_steps, num_envs)).to(device)
values = torch.zeros((num_steps, num_envs)).to(device)
next_obs = torch.Tensor(np.zeros((num_envs, 4))).to(device)
for update in range(100):
    for step in range(num_steps):
        obs[step] = next_obs
        with torch.no_grad():
            action, logprob, _, value = agent.get_action_and_value(next_obs)
            values[step] = value.flatten()
        actions[step], logprobs[step] = action, logprob
        state = np.random.randn(num_envs, 4) + action.cpu().numpy()[:, None]
        next_obs = torch.Tensor(state).to(device)
    b_obs, b_actions, b_logprobs = obs.reshape(-1, 4), actions.reshape(-1), logprobs.reshape(-1)
    b_inds = np.arange(num_steps * num_envs)
    size = len(b_inds) // minibatches
    for _epoch in range(4):
        np.random.shuffle(b_inds)
        for start in range(0, len(b_inds), size):
            mb = b_inds[start : start + size]
            _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[mb], b_actions.long()[mb])
            ratio = (newlogprob - b_logprobs[mb]).exp()
            loss = -(ratio * 0.5).mean() - 0.01 * entropy.mean() + newvalue.pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
    print(f"update {update}: {loss.item():.3f}")

"""Agents whose tools start early, on recorded sessions: what that saves, computed."""

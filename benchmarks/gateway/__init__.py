"""The gateway under load: what it adds to a call, how many calls it serves, and what it does with too many.

Three processes besides the one that measures: `upstream` and `client` speak HTTP over plain sockets, so that they need
little processor time, which is reported apart; between them stands a real `agentspec serve`.
"""

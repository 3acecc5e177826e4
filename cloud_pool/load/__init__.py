"""`causeway-cloud load`: put a load on a server with OpenAI's API, and say what its clients saw.

`traces` is what to ask and when, `client` asks, `report` computes percentiles and writes the page.

In the open loop a request's time begins when it was due, not when it was sent: a server that stalls makes the requests
behind the stall late, and they count as late (no coordinated omission). In the closed loop each user sends the next
request after the answer to the one before, so a stall makes fewer requests; such figures say what so many users see.
"""

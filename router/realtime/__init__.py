"""OpenAI's Realtime events: from the frames of a session to `router.types` and back. Pure: no sockets, no clocks.

    frame → Request      session        one client event: settings, conversation, audio, or a response
                         wire           the events' types; the fields that a client changes
                         conversation   the items, bounded; they become the messages of a response's request
                         audio          the audio of a client, until it is an item
                         spoken_input   the start and end of turns of speech in it, the stable words of its transcript
    Chunks → events      response       the events that build one response; the actions of the caller
    events → frames      event_log      numbered, kept until they are sent and for a while after: a client with a cut
                                        connection resumes by the number of the last event that it received

The request is made by `router.openai.responses`, as for `POST /v1/responses`, so routing, cache and decision records
are the same. `router.serving.live` has the sockets.
"""

"""The engine: requests in, tokens out.

The life of a request, and where each part of it lives:

 1. ``serving`` parses and validates the HTTP request; ``LLM`` and ``AsyncLLM`` start here.
 2. ``tokenizer`` renders the chat template and encodes, in a worker pool.
 3. ``input_processor`` checks ids and options and refuses what can never run (``admission``).
 4. ``core_client`` sends it to the core's process (``wire``), where ``core_server`` takes it in.
 5. ``scheduler.schedule`` decides who runs in the next step, with how many tokens.
 6. ``kv_cache_manager.allocate_slots`` finds cached prefixes and hands out blocks (``block_pool``).
 7. ``input_batch.pack`` pads the plan to a bucket (``buckets``): one int32 vector.
 8. ``model_runner.dispatch`` sends it to the compiled program (``programs``).
 9. ``step``: decoder, attention over the pool, ``sampler``; ``device_state`` is donated and returned.
10. ``model_runner.resolve`` reads the results, ``scheduler.update`` takes them in.
11. ``output_processor`` makes text, stop strings and logprobs of them (``detokenizer``, ``stop_strings``).
12. ``output_collector`` merges what a slow client has not taken yet.
13. ``serving.sse`` writes it to the client.

``Scheduler.finish`` is the only way out, from every state. What is above ``step`` in this list
never imports jax (the device line); ``docs/architecture.md`` says more.
"""

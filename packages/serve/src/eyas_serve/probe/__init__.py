"""The probe: what a running server's draft received and proposed, against the golden record, layer by layer.

`recorder` and `route` run inside SGLang (torch in functions only), the rest in the client, without torch.
"""

"""The stages are cut off a list, and stages that are left are counted before."""


class Reduction(Reduction):
    def start(self) -> None:
        number = next((i + 1 for i, stage in enumerate(self._left) if stage.travels), 0)
        if not number:
            return
        now, self._left = self._left[:number], self._left[number:]
        stream = getattr(self._streams, now[-1].stream)
        stream.wait_event(self.event)
        label = NAMES[now[-1].stream] + " " + self.unit.label
        self.event = stream.submit(lambda: self._launch(now), label)

    def advance(self) -> bool:
        more = len(self._left) > 1
        sent, self.sent = self.sent, None
        if sent is not None:
            self.event.wait()
        self.start()
        return more

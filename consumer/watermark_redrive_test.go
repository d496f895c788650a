package consumer_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/dedupe/memdedupe"
	"github.com/unecho/unecho/envelope"
)

// What is parked, the position has passed. With keys, the key decides about a
// redrive; without, nothing would, and a message that was handled after all, when
// it came again before its position was passed, would have its effect twice.
func TestWatermarkRedrive(t *testing.T) {
	for name, o := range map[string]*consumer.Options{"keys": {Extractor: envelope.CloudEvents()}, "positions alone": nil} {
		t.Run(name, func(t *testing.T) {
			effects, mended := 0, false
			wrapped := consumer.WrapWatermark("billing", memdedupe.NewStore(nil), func(_ context.Context, _ *memdedupe.Tx, m *envelope.Message) error {
				if !mended {
					return consumer.Permanent(errors.New("there is no such customer"))
				}
				effects++
				return nil
			}, o)
			lot := &memoryLot{}
			for _, h := range []consumer.Handler{wrapped, consumer.Chain(wrapped), consumer.Route(map[string]consumer.Handler{"order.placed": wrapped}, nil)} {
				mended = false
				parkAll(h, lot)
				mended = true
				for _, p := range lot.records {
					answers, err := consumer.Redrive(t.Context(), lot, h, nil, p.ID)
					switch {
					case o == nil && (err == nil || !strings.Contains(err.Error(), "WrapWatermark")):
						t.Errorf("without a key: %v, %v", answers, err)
					case o != nil && (err != nil || answers[0].Outcome == consumer.RedriveFailed):
						t.Errorf("with a key: %v, %v", answers, err)
					}
				}
			}
			if want := map[bool]int{true: 2, false: 0}[o != nil]; effects != want {
				t.Errorf("%d effects, want %d", effects, want)
			}
		})
	}
}

package pebblestore

import (
	"encoding/hex"
	"testing"
	"time"

	"github.com/posthorn/posthorn/dispatcher/queue"
)

// A message without a trace is stored as release 0.1 stored it, and what 0.1
// stored can be read: an upgrade and a rollback find each other's messages.
func TestRecordIsThatOfTheFirstRelease(t *testing.T) {
	const first = "0000018bcfe5687b" + "0000000000000007" + "02" + "026d31" + "0145" + "01" + "0873686f702f63726d" + "00" + "7b7d"
	m := queue.Message{Source: "shop/web", ID: "m1", Type: "track", Event: "E", AcceptedAt: time.UnixMilli(1_700_000_000_123), Skip: []string{"shop/crm"}, Body: []byte("{}")}
	if got := hex.EncodeToString(appendRecord(nil, &m, 7)); got != first {
		t.Errorf("stored as %s, by the first release as %s", got, first)
	}
	v, err := hex.DecodeString(first)
	if err != nil {
		t.Fatal(err)
	}
	var r record
	if err := r.decode(v); err != nil || string(r.id) != "m1" || types[r.code] != "track" || string(r.event) != "E" || len(r.trace) != 0 || string(r.body) != "{}" {
		t.Errorf("%+v, %v", r, err)
	}
}

func TestRecordSizeIsExact(t *testing.T) {
	for _, m := range []queue.Message{
		{},
		{ID: "m1", Type: "track", Event: "E", Body: []byte("{}")},
		{ID: "m1", Type: "a new type", TraceParent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", Skip: []string{"a", "b"}, Only: "c", Body: make([]byte, 300)},
	} {
		if size, got := recordSize(&m), len(appendRecord(nil, &m, 1<<40)); size != got {
			t.Errorf("%d bytes are taken for %d", got, size)
		}
	}
}

package pebblestore

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Messages of a lease share memory of a bounded size, so that a message in flight holds little beside itself.
func TestMessagesShareLittleMemory(t *testing.T) {
	r := &reader{l: new(lane), readBuffer: new(readBuffer)}
	for _, size := range []int{100, 3000, 900, 97, sharedBytes + 1, 1, 30_000} {
		r.got = append(r.got, piece{start: len(r.bytes), id: 1, body: size - 1})
		for range size {
			r.bytes = append(r.bytes, byte(len(r.got)))
		}
	}
	var bodies, shared []int
	for i := range r.got {
		shared = append(shared, len(r.shared(i)))
	}
	if diff := cmp.Diff([]int{4000, 3997, 997, 97, sharedBytes + 1, 1, 30_000}, shared); diff != "" {
		t.Errorf("bytes that the messages from each one on share (-want +got):\n%s", diff)
	}
	for i, d := range r.deliveries(nil) {
		bodies = append(bodies, len(d.Body))
		for _, b := range append([]byte(d.ID), d.Body...) {
			if int(b) != i+1 {
				t.Fatalf("message %d has a byte of message %d", i+1, b)
			}
		}
	}
	if diff := cmp.Diff([]int{99, 2999, 899, 96, sharedBytes, 0, 29_999}, bodies); diff != "" {
		t.Errorf("sizes of the bodies (-want +got):\n%s", diff)
	}
}

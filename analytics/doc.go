// Package analytics records what users do and sends it to Posthorn, or to any
// server with the same tracking API.
//
//	client := analytics.New("write key", analytics.WithEndpoint("https://track.example"))
//	defer client.Close()
//
//	err := client.Track(&analytics.Track{
//		UserId:     "u1",
//		Event:      "Order Completed",
//		Properties: map[string]interface{}{"total": 99.5},
//	})
//
// A call checks the message, serializes it and returns; it sends no request
// and does not wait. The client sends calls in batches in the background: a flush
// starts with the 20th queued call ([FlushAt]) or 5 seconds after the last flush
// ([FlushAfter]). The arguments of a call may be changed or reused as soon as it
// has returned. All methods are safe for concurrent use.
//
// Temporary failures are retried with growing, random pauses: no response, 408,
// 429 and 5xx. Each call has an id from before its first request, so that a
// server detects calls that it has already accepted. Calls that could not be
// delivered are reported to [OnResult], by [Client.Flush] and by [Client.Close].
//
// Memory is bounded ([QueueLimit], [QueueBytes]). While the queue is full a
// call fails with [ErrQueueFull] immediately; with [Blocking] it waits for space.
//
// The environment variable DEBUG=analytics enables messages for diagnosis.
//
// The package is compatible with version 2 of the vendor's library of the same
// name: a program written for it only needs another import path.
package analytics

// Package analytics records what users do and sends it to Posthorn, or to any
// server of the same tracking API.
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
// A call checks the message, serialises it and returns; it makes no request
// and does not wait. Calls travel in batches in the background: a flush starts
// with the 20th call that waits ([FlushAt]) or 5 seconds after the first
// ([FlushAfter]). What a call was given may be changed or used again as soon as
// it has returned, by the same or another goroutine: all methods are safe for
// concurrent use.
//
// What may pass is retried with growing, random pauses: no answer, 408, 429
// and 5xx. Each call has an id, made before it is first sent, so that a server
// recognises what it has already taken. Calls that could not be delivered are
// reported to [OnResult], by [Client.Flush] and by [Client.Close].
//
// Memory is bounded ([QueueLimit], [QueueBytes]). While the queue is full a
// call fails with [ErrQueueFull] at once; with [Blocking] it waits for room.
//
// The environment variable DEBUG=analytics turns on logging of everything the
// client does.
//
// The package is compatible with version 2 of the vendor's library of the same
// name: a program written for it needs another import path and nothing else.
package analytics

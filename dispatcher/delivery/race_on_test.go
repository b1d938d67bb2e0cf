//go:build race

package delivery

// scale divides the number of repetitions of tests in virtual time: under the race detector an event
// costs about 15 times as much, and the order of events is the same.
const scale = 5

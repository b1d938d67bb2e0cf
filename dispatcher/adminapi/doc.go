// Package adminapi has the types of a dispatcher's admin API: the report about its config and its
// traffic (Report), dead letters (DeadLetter, DeadLetterAction), delivery attempts (Attempt) and
// the state of lanes (LaneState).
//
// The dispatcher owns the format; the operator, the command line and benchmarks read it. The
// package imports nothing of Posthorn: it knows neither the queue nor custom resources. All JSON
// names are camelCase.
package adminapi

// Package adminapi has the types of a dispatcher's admin API and its client: the report about its
// config and its traffic (Report), dead letters (DeadLetter, DeadLetterAction), delivery attempts
// (Attempt), the state of lanes (LaneState), and Client. It also has the answers to syncs of
// audiences (SyncResult, SyncProgress), which the tracking API serves.
//
// The dispatcher owns the format; the operator, the command line, benchmarks and tests use it. The
// package imports nothing of Posthorn: it knows neither the queue nor custom resources. All JSON
// names are camelCase.
package adminapi

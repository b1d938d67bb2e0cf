// Command program does nothing. It is built for other architectures in place of posthorn, whose
// build for a second architecture takes minutes.
package main

func main() {}

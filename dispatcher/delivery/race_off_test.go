//go:build !race

package delivery

const scale = 1

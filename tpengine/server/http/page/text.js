// How numbers are written.

export const count = (number) => number.toLocaleString("en");
export const counted = (number, thing) => `${count(number)} ${thing}${number === 1 ? "" : "s"}`;
export const percent = (share) => `${(100 * share).toFixed(1)}%`;

/** A number of bytes with the unit that keeps it short. */
export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = number < 1 ? 0 : Math.min(4, Math.floor(Math.log2(number) / 10));
  const scaled = number / 1024 ** power;
  return `${scaled.toFixed(scaled < 10 && power ? 1 : 0)} ${units[power]}`;
}
